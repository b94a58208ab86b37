"""Loading: what was stored comes out packed, rows moved back, whatever the file's format and quantisation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.base.errors import ConfigError, ModelFormatError, ModelUnsupportedError
from headrace.engine.quantize import keeps_eight_bits, to_f32
from headrace.engine.weight_plan import plan_weights, weight_bytes
from headrace.engine.weights import PackedWeight, load_weights
from headrace.kernels.vm import unpack
from headrace.program.cost import layout_bytes
from headrace.program.ir import Program
from headrace.program.opcodes import Layout
from headrace.program.spec import build_program, spec_from_files
from headrace.registry.model import ModelFiles, open_model
from headrace.testing.tiny import TinyShape, tiny_tensors, write_tiny_gguf, write_tiny_llama
from headrace.testing.tiny_blocks import encode, round_to_bf16


class RecordingPack:
    """Stands for the native packer: notes what it was asked and returns bytes of the right length."""

    def __init__(self) -> None:
        self.values: dict[tuple[Layout, str, int, int], list[NDArray[np.float32]]] = {}
        self.calls: list[tuple[Layout, str]] = []

    def __call__(
        self, layout: Layout, source: str, raw: NDArray[np.generic], n: int, k: int, threads: int = 1
    ) -> NDArray[np.uint8]:
        self.calls.append((layout, source))
        rows = np.ascontiguousarray(raw).view(np.uint8).reshape(n, -1)
        # The rows as values stand in front of the padding, so a test can read back what would have been packed.
        self.values.setdefault((layout, source, n, k), []).append(to_f32(source, rows, k).copy())
        return np.zeros(layout_bytes(layout, n, k), np.uint8)

    def only(self, n: int, k: int) -> NDArray[np.float32]:
        return next(values[0] for (_, _, rows, columns), values in self.values.items() if (rows, columns) == (n, k))


def opened(path: Path) -> tuple[ModelFiles, Program]:
    files = open_model(path)
    return files, build_program(spec_from_files(files))


def by_name(program: Program, weights: list[PackedWeight]) -> dict[str, PackedWeight]:
    return {spec.name: weight for spec, weight in zip(program.weights, weights, strict=True)}


def stored_as(values: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    """Returns the values as a file of ``kind`` holds them."""
    raw = np.frombuffer(encode(values, kind).data, np.uint8).reshape(len(values), -1)
    return to_f32(kind, raw, values.shape[1])


def unpacked(weight: PackedWeight) -> NDArray[np.float32]:
    return unpack(weight.layout, weight.data, weight.n, weight.k)


def as_f32(weight: PackedWeight) -> NDArray[np.float32]:
    return weight.data.view(np.float32)


@pytest.fixture
def shape() -> TinyShape:
    return TinyShape(layers=1)


@pytest.mark.parametrize("source", ["safetensors", "gguf"])
def test_qkv_rows_are_the_three_parts_in_half_split_order(tmp_path: Path, shape: TinyShape, source: str) -> None:
    path = (
        write_tiny_llama(tmp_path / "m", layers=1, dtype="f32")
        if source == "safetensors"
        else write_tiny_gguf(tmp_path / "m.gguf", layers=1, matrix_type="F32", embedding_type="F32")
    )
    files, program = opened(path)
    pack = RecordingPack()

    load_weights(files, program, dtype="fp32", threads=1, pack=pack)

    truth = tiny_tensors(shape, 0)
    parts = [truth[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert np.array_equal(pack.only(256, 64), np.concatenate(parts))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantised_q_and_k_rows_move_as_they_are(tmp_path: Path, shape: TinyShape, kind: str) -> None:
    files, program = opened(write_tiny_gguf(tmp_path / "m.gguf", layers=1, matrix_type=kind))
    pack = RecordingPack()

    load_weights(files, program, threads=1, pack=pack)

    truth = tiny_tensors(shape, 0)
    parts = np.concatenate([truth[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"])
    raw = np.frombuffer(encode(parts, kind).data, np.uint8).reshape(len(parts), -1)
    assert np.array_equal(pack.only(256, 64), to_f32(kind, raw, 64))


def test_gate_and_up_rows_alternate_by_sixteen(tmp_path: Path, shape: TinyShape) -> None:
    files, program = opened(write_tiny_llama(tmp_path / "m", layers=1, dtype="f32"))
    pack = RecordingPack()

    load_weights(files, program, dtype="fp32", threads=1, pack=pack)

    truth = tiny_tensors(shape, 0)
    gate, up = (truth[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    fused = pack.only(192, 64)
    assert np.array_equal(fused[0:16], gate[0:16])
    assert np.array_equal(fused[16:32], up[0:16])
    assert np.array_equal(fused[160:176], gate[80:96])


def test_norms_and_rope_are_plain_f32(tmp_path: Path, shape: TinyShape) -> None:
    files, program = opened(write_tiny_llama(tmp_path / "m", layers=1))

    weights = by_name(program, load_weights(files, program, rope_positions=40, pack=RecordingPack()))

    truth = tiny_tensors(shape, 0)
    assert np.array_equal(as_f32(weights["final_norm"]), round_to_bf16(truth["model.norm.weight"]))
    assert (weights["rope"].n, weights["rope"].k) == (40, 32)
    assert as_f32(weights["rope"])[:16] == pytest.approx(1.0)
    assert all(weight.data.ctypes.data % 64 == 0 for weight in weights.values())


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("Q8_0", Layout.Q8),
        ("Q4_0", Layout.Q4),
        ("Q4_1", Layout.Q4M),
        ("Q5_0", Layout.Q8),
        ("Q5_1", Layout.Q8),
        ("F16", Layout.F16),
        ("BF16", Layout.BF16),
    ],
)
def test_stored_blocks_keep_their_own_layout(tmp_path: Path, kind: str, layout: Layout) -> None:
    files, program = opened(write_tiny_gguf(tmp_path / "m.gguf", matrix_type=kind))
    pack = RecordingPack()

    weights = by_name(program, load_weights(files, program, pack=pack))

    assert weights["layers.1.down"].layout is layout
    assert weights["embed"].layout is Layout.Q8
    assert (layout, kind) in pack.calls


def test_a_fused_weight_of_q4_0_and_q4_1_becomes_q4m_without_loss(tmp_path: Path, shape: TinyShape) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", layers=1, matrix_type="Q4_1", types={"blk.0.ffn_gate.weight": "Q4_0"})
    files, program = opened(path)

    weight = by_name(program, load_weights(files, program))["layers.0.gate_up"]

    tensors = tiny_tensors(shape, 0)
    truth = [
        stored_as(tensors[f"model.layers.0.mlp.{part}_proj.weight"], kind).reshape(-1, 16, 64)
        for part, kind in (("gate", "Q4_0"), ("up", "Q4_1"))
    ]
    assert weight.layout is Layout.Q4M
    assert np.allclose(unpacked(weight), np.stack(truth, axis=1).reshape(-1, 64), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("types", "layout", "bits"),
    [
        (("Q5_0", "Q4_0", "Q8_0"), Layout.Q8, None),
        (("Q4_1", "Q5_1", "Q8_0"), Layout.Q8, 7),
        (("Q4_K", "Q4_K", "Q6_K"), Layout.Q8, 7),
        (("Q4_K", "Q4_1", "Q4_K"), Layout.Q4M, 9),
        (("Q8_0", "Q8_0", "BF16"), Layout.BF16, 8),
    ],
)
def test_a_fused_weight_of_unlike_types_takes_the_layout_that_holds_all(
    tmp_path: Path, types: tuple[str, ...], layout: Layout, bits: int | None
) -> None:
    width = 256
    named = {f"blk.0.attn_{part}.weight": kind for part, kind in zip("qkv", types, strict=True)}
    path = write_tiny_gguf(tmp_path / "m.gguf", layers=1, width=width, matrix_type="Q4_1", types=named)
    files, program = opened(path)

    weight = by_name(program, load_weights(files, program))["layers.0.qkv"]

    tensors = tiny_tensors(TinyShape(layers=1, width=width), 0)
    truth = [
        stored_as(tensors[f"model.layers.0.self_attn.{part}_proj.weight"], kind)
        for part, kind in zip("qkv", types, strict=True)
    ]
    expected = np.concatenate(truth)
    assert weight.layout is layout
    # Relative to the largest of a row: half a step of Q8 (1/254, and what f16 takes from the scale) or bf16 (2^-8), or
    # scale and minimum rounded to f16 (2^-11 of two terms that partly cancel).
    limit = 0 if bits is None else 2.0**-bits * np.abs(expected).max(1, keepdims=True)
    assert (np.abs(unpacked(weight) - expected) <= limit).all()


@pytest.mark.parametrize(
    ("quantization", "gate_up", "others"),
    [("none", Layout.BF16, Layout.BF16), ("int8", Layout.Q8, Layout.Q8), ("int4", Layout.Q4M, Layout.Q8)],
)
def test_quantization_narrows_a_bf16_model(tmp_path: Path, quantization: str, gate_up: Layout, others: Layout) -> None:
    files, program = opened(write_tiny_llama(tmp_path / "m", is_tied=False))

    weights = by_name(program, load_weights(files, program, quantization=quantization, pack=RecordingPack()))

    assert weights["layers.0.gate_up"].layout is gate_up
    for name in ("embed", "head", "layers.0.qkv", "layers.0.o", "layers.0.down"):
        assert weights[name].layout is others, name


@pytest.mark.parametrize(
    ("roles", "width", "is_kept"),
    [
        ({"embed"}, 4096, True),
        ({"head"}, 4096, True),
        ({"q", "k", "v"}, 4096, True),
        ({"o"}, 1024, False),
        ({"o"}, 896, True),
        ({"down"}, 1024, False),
        ({"down"}, 640, True),
        ({"gate", "up"}, 640, False),
        ({"expert_down"}, 640, False),
    ],
    ids=str,
)
def test_int4_keeps_eight_bits_where_they_save_most(roles: set[str], width: int, is_kept: bool) -> None:
    assert keeps_eight_bits(roles, width) is is_kept


def test_quantization_never_widens_a_model_that_is_narrower_already(tmp_path: Path) -> None:
    files, program = opened(write_tiny_gguf(tmp_path / "m.gguf", matrix_type="Q4_0"))

    weights = by_name(program, load_weights(files, program, quantization="int8", pack=RecordingPack()))

    assert weights["layers.0.o"].layout is Layout.Q4


def test_a_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    files, program = opened(write_tiny_llama(tmp_path / "m"))
    pack = RecordingPack()

    weights = load_weights(files, program, pack=pack)

    assert "head" not in by_name(program, weights)
    assert sum((n, k) == (320, 64) for _, _, n, k in pack.values) == 1


def test_a_stored_head_of_a_tied_model_is_ignored(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", is_tied=False)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))

    files, program = opened(folder)

    assert all(spec.name != "head" for spec in program.weights)
    assert load_weights(files, program, pack=RecordingPack())


def test_progress_reaches_the_estimate_made_from_headers(tmp_path: Path) -> None:
    files, program = opened(write_tiny_gguf(tmp_path / "m.gguf"))
    seen: list[tuple[int, int]] = []

    load_weights(files, program, pack=RecordingPack(), progress=lambda done, total: seen.append((done, total)))

    estimate = weight_bytes(files, program, "bf16", "none")
    assert seen[-1] == (estimate, estimate)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_missing_and_misshapen_tensors_are_all_named(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3').replace(
            '"intermediate_size": 96', '"intermediate_size": 128'
        )
    )
    files, program = opened(folder)

    with pytest.raises(ModelFormatError) as caught:
        plan_weights(files, program, dtype="bf16", quantization="none")

    assert "model.layers.0.mlp.gate_proj.weight has shape [96, 64], expected [128, 64]" in caught.value.message
    assert "more" in caught.value.message


def test_tensors_beyond_the_program_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    files, program = opened(folder)

    with pytest.raises(ModelFormatError, match=r"model\.layers\.1\.input_layernorm\.weight' is not part"):
        plan_weights(files, program, dtype="bf16", quantization="none")


def test_a_norm_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", dtype="f32")
    path = folder / "model.safetensors"
    norm = tiny_tensors(TinyShape(), 0)["model.norm.weight"]
    content = path.read_bytes()
    path.write_bytes(content.replace(norm.tobytes(), np.full_like(norm, np.nan).tobytes()))
    files, program = opened(folder)

    with pytest.raises(ModelFormatError, match=r"model\.norm\.weight: holds a value that is not a finite number"):
        load_weights(files, program, pack=RecordingPack())


@pytest.mark.parametrize(
    ("dtype", "quantization", "words"),
    [("fp16", "none", "fp16"), ("fp32", "int8", "contradicts"), ("bf16", "int2", "int2")],
)
def test_precisions_the_engine_lacks_are_refused(tmp_path: Path, dtype: str, quantization: str, words: str) -> None:
    files, program = opened(write_tiny_llama(tmp_path / "m"))

    with pytest.raises(ConfigError, match=words):
        plan_weights(files, program, dtype=dtype, quantization=quantization)


def test_block_types_without_a_kernel_are_refused_by_name(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", width=256, hidden=256, matrix_type="Q8_0")
    files, program = opened(path)
    tensor = files.tensors["blk.0.ffn_down.weight"]
    files.tensors["blk.0.ffn_down.weight"] = type(tensor)(tensor.name, "IQ4_XS", tensor.shape, tensor.data)

    with pytest.raises(ModelUnsupportedError, match=r"blk\.0\.ffn_down\.weight is stored as IQ4_XS"):
        plan_weights(files, program, dtype="bf16", quantization="none")
