"""How the rows of a sequence become its vector, as a folder's sentence-transformers files say."""

from __future__ import annotations

from dataclasses import replace

from headrace.program.families.checks import unsupported
from headrace.program.keys import Keys
from headrace.program.model import Architecture, ModelSpec
from headrace.program.opcodes import Pooling

_MODES = {
    "pooling_mode_cls_token": Pooling.FIRST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_OTHER_MODES = ("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
_NAMES = {"cls": Pooling.FIRST, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}


def with_pooling(spec: ModelSpec, keys: Keys) -> ModelSpec:
    """Returns the spec with the pooling that a ``1_Pooling/config.json`` asks for.

    A decoder that comes with one makes vectors (Qwen3-Embedding, E5-Mistral): it is an encoder whose rows see backwards
    only, and has no head.

    Raises:
        ModelFormatError: the width is another, or no mode is chosen.
        ModelUnsupportedError: a mode that no instruction has, or several at once.
    """
    if spec.architecture is Architecture.DECODER_ONLY:
        spec = replace(spec, architecture=Architecture.ENCODER_ONLY, is_causal=True)
    if keys.integer("word_embedding_dimension", 1, 2**20, default=spec.width) != spec.width:
        raise keys.refuse("word_embedding_dimension", f"but the model's width is {spec.width}")
    if keys.has("pooling_mode"):
        name = keys.text("pooling_mode")
        if name not in _NAMES:
            raise unsupported(keys, "pooling_mode", name, ", ".join(_NAMES))
        return replace(spec, pooling=_NAMES[name])
    chosen = [mode for mode in (*_MODES, *_OTHER_MODES) if keys.boolean(mode, False)]
    if not chosen:
        raise keys.refuse("pooling_mode_mean_tokens", f"one of {', '.join(_MODES)} must be true")
    if len(chosen) > 1 or chosen[0] not in _MODES:
        raise unsupported(keys, chosen[-1], True, f"one of {', '.join(_MODES)}")
    return replace(spec, pooling=_MODES[chosen[0]])
