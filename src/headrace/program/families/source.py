"""Where a model's files keep each weight: stored tensor, rows within it, and how they must be changed.

A program speaks of roles (``layers.3.q``); a family answers with the places that a kind of file may keep them in. What
is done about them (slicing, transposing, reordering) is the loader's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of one stored tensor, as they make up one role.

    Args:
        name: the stored tensor.
        start: its first row that belongs to the role.
        rows: rows of the whole tensor; None when the role is all of it.
        is_transposed: stored as [in, out] (GPT-2's Conv1D), so that rows are columns there.
        is_interleaved: source row 2·i + j of a head is row i + j·D/2 of the half-split order that the VM turns.
        experts: leading dimension of a stacked tensor [experts, rows, in]; 0 for a plain one.
        expert: which of them.
        offset: added to every element (Gemma stores a norm's weight minus one).
    """

    name: str
    start: int = 0
    rows: int | None = None
    is_transposed: bool = False
    is_interleaved: bool = False
    experts: int = 0
    expert: int = 0
    offset: float = 0.0

    def part(self, start: int, rows: int) -> Source:
        """Returns the place that starts at row ``start`` of a tensor of ``rows`` rows."""
        return replace(self, start=start, rows=rows)


@dataclass(frozen=True, slots=True)
class Role:
    """A role's name taken apart: ``layers.3.q_bias`` is layer 3, ``q``, a bias. ``layer`` is −1 outside the layers.

    Args:
        expert: of ``layers.3.expert_up.7``: 7; else −1.
    """

    layer: int
    name: str
    is_bias: bool
    expert: int

    @staticmethod
    def of(role: str) -> Role:
        """Returns the parts of ``role``."""
        words = role.split(".")
        if words[0] != "layers":
            return Role(-1, role.removesuffix("_bias"), role.endswith("_bias"), -1)
        name = words[2]
        return Role(
            int(words[1]), name.removesuffix("_bias"), name.endswith("_bias"), int(words[3]) if words[3:] else -1
        )


@dataclass(frozen=True, slots=True)
class Names:
    """How one kind of file spells the roles.

    Args:
        prefix: what stands before a layer's own names, with the layer's number as ``{}``.
        top: stems outside the layers, by role.
        layer: stems within a layer, by role; an expert's number stands as ``{}``.
    """

    prefix: str
    top: Mapping[str, str]
    layer: Mapping[str, str]

    def source(self, role: str) -> Source:
        """Returns the tensor of ``role``, whole."""
        at = Role.of(role)
        suffix = "bias" if at.is_bias else "weight"
        if at.layer < 0:
            return Source(f"{self.top[at.name]}.{suffix}")
        stem = self.layer[at.name].format(at.expert)
        return Source(f"{self.prefix.format(at.layer)}{stem}.{suffix}")

    def but(self, **layer: str) -> Names:
        """Returns the same names with some of the layer's stems replaced or added."""
        return replace(self, layer={**self.layer, **layer})


HF_NAMES = Names(
    "model.layers.{}.",
    {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
    {
        "attention_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "o": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
)
"""The names that most families of transformers share (Llama's)."""
_GGUF = Names(
    "blk.{}.",
    {"embed": "token_embd", "positions": "position_embd", "final_norm": "output_norm", "head": "output"},
    {
        "attention_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "o": "attn_output",
        "attention_out_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
        "mlp_out_norm": "post_ffw_norm",
        "router": "ffn_gate_inp",
        "expert_gate": "ffn_gate_exps",
        "expert_up": "ffn_up_exps",
        "expert_down": "ffn_down_exps",
    },
)


def hf_source(role: str, names: Names = HF_NAMES) -> tuple[Source, ...]:
    """Returns the places of ``role`` in a file of transformers; one of the model without its head lacks the prefix."""
    plain = names.source(role)
    return (plain, replace(plain, name=plain.name.removeprefix("model.")))


def beside_vision(plain: Source) -> tuple[Source, ...]:
    """Returns the places of a language model's weight, with and without a vision tower in the same files."""
    inner = plain.name.removeprefix("model.")
    names = (plain.name, f"language_model.{plain.name}", f"model.language_model.{inner}", inner)
    return tuple(replace(plain, name=name) for name in names)


def gguf_source(role: str, experts: int = 0) -> Source:
    """Returns the place of ``role`` in a GGUF file, which has one table of names for all architectures.

    Args:
        experts: how many; theirs lie in one stacked tensor.
    """
    source = _GGUF.source(role)
    expert = Role.of(role).expert
    return source if expert < 0 else replace(source, experts=experts, expert=expert)
