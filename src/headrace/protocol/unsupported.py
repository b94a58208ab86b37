"""Fields that are known, would change the answer and are not run here: refused by name where they ask for something.

Each table gives what a field may be all the same, because it asks for nothing. Fields that nobody here knows are no
error; they are listed as ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace.base.errors import RequestError
from headrace.protocol.fields import Fields

Harmless = Mapping[str, tuple[object, ...]]

# Of chat and text completions. The second half are samplers of llama.cpp's server and of those that took its names.
GENERATE: Final[Harmless] = {
    "audio": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": ([],),
    "logits_processors": ([],),
    "lora": ([],),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "structural_tag": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "watermarking": (False,),
    "web_search_options": (),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "n_predict": (-1,),
    "repeat_penalty": (1, 1.0),
    "samplers": ([],),
    "tfs_z": (1, 1.0),
    "top_n_sigma": (-1, -1.0),
    "typical_p": (1, 1.0),
    "xtc_probability": (0, 0.0),
}
# Of the routes of encoders.
ENCODE: Final[Harmless] = {
    "add_special_tokens": (True,),
    "late_chunking": (False,),
    "late_chunking_params": (),
    "padding": (False, "do_not_pad"),
    "prompt_name": ("",),
    "truncation_side": ("right",),
}
# Of routes that give vectors, which are of length 1.
VECTORS: Final[Harmless] = {**ENCODE, "normalize": (True,), "use_activation": (True,)}

_HINTS: Final = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "logprob_token_ids": "logprobs and top_logprobs tell the likeliest tokens",
    "n_predict": "use max_tokens",
    "repeat_penalty": "use repetition_penalty",
    "normalize": "vectors are of length 1",
    "use_activation": "vectors are of length 1",
    "truncation_side": "what is cut is the end",
}


def refuse(fields: Fields, table: Harmless) -> None:
    """Refuses fields of a table that ask for something.

    Raises:
        RequestError: ``unsupported_parameter``, naming the first of them by name.
    """
    for name, value in sorted(fields.take_all(table.keys()).items()):
        if not any(value == harmless and type(value) is type(harmless) for harmless in table[name]):
            raise unsupported(fields.path_of(name), _HINTS.get(name, "leave it out"))


def unsupported(param: str, what_to_do: str = "leave it out") -> RequestError:
    """Makes the error for a field that is not run here."""
    return RequestError(
        f"{param} is not supported by this server: {what_to_do}", param=param, code="unsupported_parameter"
    )
