"""The vocabulary of the tiny test models: 256 bytes, ChatML specials and a few merges, as tokenizer.json or GGUF keys.

Ids: 0 ``<|endoftext|>``, 1 ``<|im_start|>``, 2 ``<|im_end|>``, 3 … 258 the bytes in the byte-level alphabet's order,
then one id per merge, then ``<|reserved_n|>`` specials up to the wanted size.
"""

from __future__ import annotations

from typing import Any

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2
MIN_VOCABULARY = len(SPECIALS) + 256

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Frequent English pairs; each merge's parts are single bytes or earlier merges. "Ġ" is the alphabet's space.
_MERGE_LIST = (
    "Ġ t|h e|i n|Ġ a|r e|o n|Ġt he|e r|Ġ s|a t|Ġ w|Ġ o|e n|Ġ c|i t|i s|a n|o r|e s|Ġ b|e d|Ġ f|in g|Ġ p|o u|Ġa n|a l|"
    "a r|Ġt o|Ġ m|Ġo f|Ġ in|Ġ d|Ġ h|Ġan d|i c|a s|l e|Ġt h|i on|o m|l l|en t|Ġ n|Ġ l|s t|Ġ re|v e|Ġ e|"
    "r o|l y|Ġb e|Ġ g|Ġ T|c t|Ġ S|i d|o t|Ġ I|u t|e t"
)


def byte_alphabet() -> list[str]:
    """Returns the printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def vocabulary(size: int) -> tuple[list[str], list[str], list[bool]]:
    """Returns token strings by id, merges (``"a b"``) and which ids are specials. ``size`` ≥ ``MIN_VOCABULARY``."""
    assert size >= MIN_VOCABULARY, f"a tiny vocabulary needs {MIN_VOCABULARY} ids, not {size}"
    merges = _MERGE_LIST.split("|")[: size - MIN_VOCABULARY]
    tokens = [*SPECIALS, *byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
    num_ordinary = len(tokens)
    tokens += [f"<|reserved_{index}|>" for index in range(size - num_ordinary)]
    return tokens, merges, [index < len(SPECIALS) or index >= num_ordinary for index in range(size)]


def tokenizer_json(size: int) -> dict[str, Any]:
    """Returns the content of a tokenizer.json of ``size`` ids."""
    tokens, merges, is_special = vocabulary(size)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **added} for index, token in enumerate(tokens) if is_special[index]
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def tokenizer_config(context_tokens: int) -> dict[str, Any]:
    """Returns the content of a tokenizer_config.json with the ChatML template."""
    return {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML_TEMPLATE,
    }


def gguf_tokenizer(size: int) -> dict[str, Any]:
    """Returns the same tokenizer as GGUF keys (``tokenizer.*``)."""
    tokens, merges, is_special = vocabulary(size)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if special else 1 for special in is_special],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML_TEMPLATE,
    }
