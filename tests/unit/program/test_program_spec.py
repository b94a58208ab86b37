"""What model descriptions become a spec, and which are refused, and how."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import ModelError, ModelFormatError, ModelUnsupportedError
from headrace.program.families.llama import sources
from headrace.program.families.source import Source
from headrace.program.spec import (
    Architecture,
    RopeKind,
    build_program,
    spec_from_config,
    spec_from_files,
    spec_from_gguf,
)

SMOL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    dtype: str = "F32"
    raw: memoryview = field(default_factory=lambda: memoryview(b""))


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 32,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 512,
    "tokenizer.ggml.tokens": ["a"] * 320,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
TENSORS = {"token_embd.weight": Tensor((320, 64))}


def test_config_of_smollm2_gives_its_shape() -> None:
    spec = spec_from_config(SMOL)

    assert (spec.layers, spec.width, spec.heads, spec.kv_heads, spec.head_size) == (30, 576, 9, 3, 64)
    assert (spec.hidden, spec.vocab_size, spec.context_tokens, spec.norm_eps) == (1536, 49152, 8192, 1e-5)
    assert spec.rope is not None
    assert (spec.rope.theta, spec.rope.kind) == (100000.0, RopeKind.DEFAULT)
    assert (spec.is_tied, spec.bos_token_id, spec.eos_token_ids, spec.window) == (True, 1, (2,), 0)
    assert spec.architecture is Architecture.DECODER_ONLY


def test_config_that_is_silent_means_what_transformers_assumes() -> None:
    llama = spec_from_config({"architectures": ["LlamaForCausalLM"]})
    mistral = spec_from_config({"architectures": ["MistralForCausalLM"]})

    assert (llama.width, llama.hidden, llama.kv_heads, llama.context_tokens, llama.window) == (4096, 11008, 32, 2048, 0)
    assert (mistral.hidden, mistral.kv_heads, mistral.context_tokens, mistral.window) == (14336, 8, 131072, 4096)
    assert (llama.norm_eps, llama.bos_token_id, llama.eos_token_ids, llama.is_tied) == (1e-6, 1, (2,), False)


def test_mistral_with_null_window_sees_everything() -> None:
    spec = spec_from_config({"architectures": ["MistralForCausalLM"], "sliding_window": None})

    assert spec.window == 0


def test_window_as_long_as_the_context_is_no_window() -> None:
    config = {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "max_position_embeddings": 4096}

    assert spec_from_config(config).window == 0


def test_ends_of_generation_config_are_added() -> None:
    spec = spec_from_config({**SMOL, "eos_token_id": [7, 8]}, {"eos_token_id": [8, 9]})

    assert spec.eos_token_ids == (7, 8, 9)


def test_newer_spelling_of_rope_means_the_same() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 4096
    old = spec_from_config({**SMOL, "rope_scaling": scaling})
    new = {**SMOL, "rope_parameters": {**scaling, "rope_theta": 100000}}
    del new["rope_theta"]

    assert spec_from_config(new).rope == old.rope


def test_biases_become_weights_of_the_program() -> None:
    program = build_program(spec_from_config({**SMOL, "attention_bias": True, "mlp_bias": True}))

    names = {weight.name for weight in program.weights if weight.kind == "vector"}
    assert {"layers.0.qkv_bias", "layers.0.o_bias", "layers.0.gate_up_bias", "layers.0.down_bias"} <= names


REFUSED = [
    ({"hidden_size": 2**31}, "hidden_size"),
    ({"hidden_size": "576"}, "hidden_size"),
    ({"hidden_size": 576.0}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"num_hidden_layers": -1}, "num_hidden_layers"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_key_value_heads": 2}, "KV heads"),
    ({"head_dim": 16}, "head_dim"),
    ({"head_dim": 80}, "head size"),
    ({"intermediate_size": 1537}, "MLP width"),
    ({"vocab_size": 10**9}, "vocab_size"),
    ({"max_position_embeddings": 10**9}, "max_position_embeddings"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ({"rope_theta": float("nan")}, "rope_theta"),
    ({"rope_theta": float("inf")}, "rope_theta"),
    ({"rope_theta": -1.0}, "rope_theta"),
    ({"rope_scaling": []}, "rope_scaling"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "short_factor"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "rotary factors"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [0.0], "long_factor": [1.0]}}, "short_factor"),
    ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "rope_type"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "high"),
    ({"hidden_act": "quick_gelu"}, "hidden_act"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ({"eos_token_id": 49152}, "eos_token_id"),
    ({"eos_token_id": [[2]]}, "eos_token_id"),
    ({"eos_token_id": list(range(1000))}, "eos_token_id"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"architectures": []}, "architectures"),
    ({"architectures": "LlamaForCausalLM"}, "architectures"),
    ({"architectures": ["x" * 10**6]}, "architecture"),
]


@pytest.mark.parametrize(("change", "named"), REFUSED, ids=lambda value: str(value)[:60])
def test_config_with_a_wrong_value_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        spec_from_config({**SMOL, **change})

    assert named in str(caught.value)
    assert len(str(caught.value)) < 500


def test_unknown_architecture_is_refused_with_what_may_run_it() -> None:
    with pytest.raises(ModelUnsupportedError, match="MambaForCausalLM") as caught:
        spec_from_config({**SMOL, "architectures": ["MambaForCausalLM"]})

    assert "--engine vllm" in str(caught.value)
    assert "llama" in str(caught.value)


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta"]), st.floats() | st.text(max_size=6)),
)


@given(
    st.dictionaries(st.sampled_from([*SMOL, "head_dim", "rope_scaling", "rope_parameters", "sliding_window"]), HOSTILE)
)
@settings(max_examples=300, deadline=None)
def test_any_config_gives_a_spec_or_a_model_error(change: dict[str, object]) -> None:
    try:
        spec = spec_from_config({**SMOL, **change})
    except ModelError:
        return

    assert 0 < spec.width <= 2**16
    assert 0 < spec.context_tokens <= 2**24


def test_gguf_metadata_gives_its_shape() -> None:
    spec = spec_from_gguf(GGUF, TENSORS)

    assert (spec.layers, spec.width, spec.heads, spec.kv_heads, spec.head_size) == (2, 64, 2, 1, 32)
    assert (spec.hidden, spec.vocab_size, spec.context_tokens, spec.is_tied) == (96, 320, 512, True)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))


def test_gguf_with_rope_factors_uses_them() -> None:
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    tensors = {**TENSORS, "rope_freqs.weight": Tensor((16,), raw=memoryview(factors.tobytes()))}

    spec = spec_from_gguf(GGUF, tensors)

    assert spec.rope is not None
    assert spec.rope.kind is RopeKind.FACTORS
    assert spec.rope.factors == tuple(factors.tolist())


def test_gguf_with_output_tensor_and_biases_is_seen() -> None:
    names = ["output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias"]

    spec = spec_from_gguf(GGUF, {**TENSORS, **{name: Tensor((64,)) for name in names}})

    assert not spec.is_tied
    assert spec.has_attention_bias
    assert spec.has_output_bias
    assert spec.has_mlp_bias


NAN_FACTORS = memoryview(np.full(16, np.nan, np.float32).tobytes())
GGUF_REFUSED = [
    ({"llama.embedding_length": 2**31}, {}, "embedding_length"),
    ({"llama.block_count": 0}, {}, "block_count"),
    ({"llama.context_length": 10**9}, {}, "context_length"),
    ({"llama.rope.freq_base": float("nan")}, {}, "freq_base"),
    ({"llama.rope.dimension_count": 16}, {}, "dimension_count"),
    ({"llama.rope.scaling.type": "longrope"}, {}, "scaling.type"),
    ({"llama.expert_count": 8}, {}, "expert_used_count"),
    ({"llama.expert_count": 8, "llama.expert_used_count": 9}, {}, "experts per token"),
    ({"llama.attention.value_length": 64}, {}, "value_length"),
    ({"llama.vocab_size": 321}, {}, "vocab_size"),
    ({"tokenizer.ggml.tokens": ["a"] * 319}, {}, "tokens"),
    ({"tokenizer.ggml.eos_token_id": 320}, {}, "eos_token_id"),
    ({}, {"token_embd.weight": Tensor((320, 65))}, "token_embd"),
    ({}, {"rope_freqs.weight": Tensor((15,))}, "rope_freqs"),
    ({}, {"rope_freqs.weight": Tensor((16,), raw=NAN_FACTORS)}, "rope_freqs"),
    ({"general.architecture": "mamba"}, {}, "--engine vllm"),
    ({"general.architecture": 3}, {}, "general.architecture"),
]


@pytest.mark.parametrize(("change", "tensors", "named"), GGUF_REFUSED, ids=lambda value: str(value)[:50])
def test_gguf_with_a_wrong_value_is_refused_by_name(
    change: dict[str, object], tensors: dict[str, Tensor], named: str
) -> None:
    with pytest.raises((ModelFormatError, ModelUnsupportedError)) as caught:
        spec_from_gguf({**GGUF, **change}, {**TENSORS, **tensors})

    assert named in str(caught.value)


def test_gguf_without_embedding_is_refused() -> None:
    with pytest.raises(ModelFormatError, match=r"token_embd\.weight"):
        spec_from_gguf(GGUF, {})


@given(st.dictionaries(st.sampled_from([key for key in GGUF if key != "tokenizer.ggml.tokens"]), HOSTILE))
@settings(max_examples=200, deadline=None)
def test_any_gguf_metadata_gives_a_spec_or_a_model_error(change: dict[str, object]) -> None:
    try:
        spec = spec_from_gguf({**GGUF, **change}, TENSORS)
    except ModelError:
        return

    assert spec.vocab_size == 320


@dataclass(frozen=True)
class Files:
    kind: str
    config: dict[str, object]
    generation_config: dict[str, object]
    metadata: dict[str, object]
    tensors: dict[str, Tensor]
    pooling: dict[str, object] = field(default_factory=dict)


def test_files_of_either_format_give_a_spec() -> None:
    assert spec_from_files(Files("gguf", {}, {}, GGUF, TENSORS)) == spec_from_gguf(GGUF, TENSORS)
    assert spec_from_files(Files("safetensors", SMOL, {}, {}, {})) == spec_from_config(SMOL)


def first_source(role: str, kind: str) -> Source:
    return sources(spec_from_config(SMOL), role, kind)[0]


@pytest.mark.parametrize(
    ("role", "hf", "gguf"),
    [
        ("embed", "model.embed_tokens.weight", "token_embd.weight"),
        ("head", "lm_head.weight", "output.weight"),
        ("layers.12.q", "model.layers.12.self_attn.q_proj.weight", "blk.12.attn_q.weight"),
        ("layers.0.k_bias", "model.layers.0.self_attn.k_proj.bias", "blk.0.attn_k.bias"),
        ("layers.3.attention_norm", "model.layers.3.input_layernorm.weight", "blk.3.attn_norm.weight"),
    ],
)
def test_source_names(role: str, hf: str, gguf: str) -> None:
    assert first_source(role, "hf").name == hf
    assert first_source(role, "gguf").name == gguf


def test_only_gguf_query_and_key_rows_are_permuted() -> None:
    roles = ("q", "k", "v", "o", "q_bias")

    permuted = [role for role in roles if first_source(f"layers.0.{role}", "gguf").is_interleaved]

    assert permuted == ["q", "k", "q_bias"]
    assert not first_source("layers.0.q", "hf").is_interleaved
