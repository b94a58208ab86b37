"""What each family reads out of a description, beyond what transformers' goldens show, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import ModelError, ModelUnsupportedError
from headrace.program.families.registry import FAMILIES, GGUF_FAMILIES
from headrace.program.families.source import Source
from headrace.program.model import ModelSpec, RopeKind
from headrace.program.opcodes import Activation, Norm
from headrace.program.spec import build_program, spec_from_config, spec_from_gguf
from headrace.program.verify import verify
from headrace.testing.tiny_families import CASES, ENCODERS


@dataclass(frozen=True)
class Shape:
    """A stored tensor by its header."""

    shape: tuple[int, ...]
    dtype: str = "F32"

    @property
    def raw(self) -> memoryview:
        return memoryview(np.ones(self.shape, np.float32).tobytes())


GEMMA3_270M = {
    "architectures": ["Gemma3ForCausalLM"],
    "_sliding_window_pattern": 6,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "vocab_size": 262144,
}
PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}


def test_every_tiny_case_builds_a_program_that_verifies() -> None:
    families = set()
    for config in [*CASES.values(), *ENCODERS.values()]:
        program = build_program(spec_from_config(config))
        verify(program)
        families.add(program.spec.family)

    assert families == set(FAMILIES)


def test_gemma3_270m_has_windows_and_local_bases_on_five_of_six_layers() -> None:
    spec = spec_from_config(GEMMA3_270M)

    windows = [spec.layer(index).window for index in range(18)]
    bases = [rope.theta for index in range(18) if (rope := spec.layer(index).rope) is not None]
    assert windows == [512, 512, 512, 512, 512, 0] * 3
    assert bases == [1e4, 1e4, 1e4, 1e4, 1e4, 1e6] * 3
    assert (spec.attention_scale, spec.embed_scale, spec.logit_softcap) == (1 / 16, 640**0.5, 0.0)
    assert (spec.has_qk_norm, spec.has_output_norms, spec.is_tied) == (True, True, True)
    assert spec.activation is Activation.GELU_TANH


def test_phi4_mini_turns_three_quarters_and_has_two_sets_of_factors() -> None:
    spec = spec_from_config(PHI4_MINI)

    assert (spec.head_size, spec.rotary_size, spec.window) == (128, 96, 0)
    assert spec.rope is not None
    assert spec.rope.kind is RopeKind.LONGROPE
    assert (spec.rope.factors[0], spec.rope.long_factors[0], spec.rope.original_context_tokens) == (1.0, 2.0, 4096)
    assert spec.rope.attention_factor == pytest.approx(1.19024, abs=1e-5)


def test_fused_tensors_are_cut_from_top_to_bottom() -> None:
    spec = spec_from_config(PHI4_MINI)
    sources = FAMILIES["phi3"].sources

    parts = [sources(spec, f"layers.2.{name}", "hf")[0] for name in ("q", "k", "v", "gate", "up")]

    assert [(part.start, part.rows) for part in parts] == [
        (0, 5120),
        (3072, 5120),
        (4096, 5120),
        (0, 16384),
        (8192, 16384),
    ]
    assert {part.name for part in parts[:3]} == {"model.layers.2.self_attn.qkv_proj.weight"}
    assert sources(spec, "layers.2.up", "gguf")[0] == Source("blk.2.ffn_up.weight", 8192, 16384)


def test_gpt2_names_come_with_and_without_their_prefix() -> None:
    spec = spec_from_config(CASES["gpt2"])
    sources = FAMILIES["gpt2"].sources

    names = [source.name for source in sources(spec, "layers.1.k_bias", "hf")]

    assert names == ["transformer.h.1.attn.c_attn.bias", "h.1.attn.c_attn.bias"]
    assert [source.name for source in sources(spec, "head", "hf")] == ["lm_head.weight"]
    assert spec.norm is Norm.LAYER


def test_smollm3_leaves_every_fourth_layer_without_positions() -> None:
    spec = spec_from_config({"architectures": ["SmolLM3ForCausalLM"]})
    listed = spec_from_config(
        {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 2, "no_rope_layers": [0, 1]}
    )

    assert [spec.layer(index).rope is None for index in range(8)] == [False, False, False, True] * 2
    assert [listed.layer(index).rope is None for index in range(2)] == [True, False]


def test_qwen3_moe_has_plain_layers_where_it_says() -> None:
    base = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4}

    def experts(spec: ModelSpec) -> list[tuple[int, int]]:
        return [(spec.layer(index).experts, spec.layer(index).hidden) for index in range(4)]

    assert experts(spec_from_config(base)) == [(128, 768)] * 4
    assert experts(spec_from_config({**base, "decoder_sparse_step": 2})) == [(0, 6144), (128, 768)] * 2
    assert experts(spec_from_config({**base, "mlp_only_layers": [3]})) == [(128, 768)] * 3 + [(0, 6144)]


def test_windows_of_qwen2_are_off_unless_asked_for() -> None:
    base = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024, "max_window_layers": 30}

    plain = spec_from_config(base)
    asked = spec_from_config({**base, "use_sliding_window": True})

    assert {plain.layer(index).window for index in range(32)} == {0}
    assert [asked.layer(index).window for index in range(28, 32)] == [0, 0, 1024, 1024]


UNSUPPORTED = [
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma2", {"hidden_activation": "quick_gelu"}, "hidden_activation"),
    ("gemma2", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
    ("qwen2_window", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types[1] is 'chunked_attention'"),
    ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("phi3", {"rope_scaling": {"rope_type": "proportional"}}, "rope_type"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"n_embd": 96, "n_head": 2}, "head size"),
    ("qwen3_moe", {"moe_intermediate_size": 40}, "MLP width"),
    ("stablelm", {"use_parallel_residual": True}, "use_parallel_residual"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
    (
        "mistral",
        {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "ministral3"}},
        "text_config.model_type",
    ),
]


@pytest.mark.parametrize(("case", "change", "named"), UNSUPPORTED, ids=lambda value: str(value)[:40])
def test_an_unsupported_variant_is_one_line_with_a_way_out(case: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelUnsupportedError) as caught:
        spec_from_config({**CASES[case], **change})

    message = str(caught.value)
    assert named in message
    assert "\n" not in message
    assert caught.value.hint == "--engine vllm may run this model"


CONTRADICTIONS = [
    ("mixtral", {"num_experts_per_tok": 5}, "experts per token"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 2]}, "no_rope_layers[3] is 2"),
    ("gemma3", {"layer_types": "full_attention"}, "layer_types"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("gpt2", {"n_head": 3}, "n_embd"),
    ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config"),
]


@pytest.mark.parametrize(("case", "change", "named"), CONTRADICTIONS, ids=lambda value: str(value)[:40])
def test_a_contradiction_is_refused_by_name(case: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_config({**CASES[case], **change})

    assert named in str(caught.value)


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(0, 8),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(0, 3) | st.text(max_size=4), max_size=4),
    st.dictionaries(
        st.sampled_from(["rope_type", "factor", "short_factor", "full_attention", "partial_rotary_factor"]),
        st.floats() | st.text(max_size=6) | st.lists(st.floats(), max_size=2),
    ),
)
EXTRA = ["rope_scaling", "rope_parameters", "layer_types", "no_rope_layers", "mlp_only_layers", "sliding_window"]


ALL = {**CASES, **ENCODERS}


@pytest.mark.parametrize("case", ALL)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_config_of_a_family_gives_a_spec_or_a_model_error(case: str, data: st.DataObject) -> None:
    change = data.draw(st.dictionaries(st.sampled_from([*ALL[case], *EXTRA]), HOSTILE, max_size=3))
    change.pop("architectures", None)
    try:
        spec = spec_from_config({**ALL[case], **change})
    except ModelError:
        return

    assert 0 < spec.width <= 2**16
    assert all(spec.layer(index).hidden > 0 for index in range(spec.layers))


CONVERTED = json.loads((Path(__file__).parents[2] / "golden" / "families_gguf.json").read_text())


@pytest.mark.parametrize("case", CONVERTED)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_gguf_metadata_of_a_family_gives_a_spec_or_a_model_error(case: str, data: st.DataObject) -> None:
    metadata = {"general.architecture": CONVERTED[case]["architecture"], **CONVERTED[case]["metadata"]}
    prefix = CONVERTED[case]["architecture"] + "."
    extra = ["attention.sliding_window_pattern", "rope.scaling.type", "expert_count", "pooling_type", "vocab_size"]
    keys = [*CONVERTED[case]["metadata"], *(prefix + key for key in extra)]
    change = data.draw(st.dictionaries(st.sampled_from(keys), HOSTILE, max_size=3))
    tensors = {name: Shape(tuple(shape[:-1])) for name, shape in CONVERTED[case]["tensors"].items()}
    try:
        spec = spec_from_gguf({**metadata, **change}, tensors)
    except ModelError:
        return

    assert all(spec.layer(index).hidden > 0 for index in range(spec.layers))


def test_gguf_architectures_have_families() -> None:
    assert set(GGUF_FAMILIES.values()) <= set(FAMILIES.values())
