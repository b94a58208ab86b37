"""The demo model rewritten in every stored format, and how far each may be from its own exact path.

Values are those of the derived bf16 model, encoded plainly (``tiny_blocks``, ``packed_models``): what is measured is
what the engine loses on the way from a file's numbers to its answers, not what the encoder lost before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.engine.quality import QualityReport, Subject, compare
from headrace.engine.quality_bench import text_windows
from headrace.registry.formats.gguf import open_gguf
from headrace.registry.model import open_model
from headrace.testing.derive import dequantise
from headrace.testing.packed_models import Packing, write_packed_folder
from headrace.testing.tiny_blocks import SUPER_BLOCK, encode
from headrace.testing.tiny_files import gguf_bytes
from headrace.text.prose import shipped_text


@dataclass(frozen=True, slots=True)
class Format:
    """One stored format.

    Args:
        stored: a type of ``tiny_blocks.encode``, or how to pack.
        max_kl: limit of the mean divergence from the exact path on the same file, nats.
    """

    name: str
    stored: str | Packing
    max_kl: float


# Floats: bf16 KV and, for BF16, bf16 activations. The rest: activations of eight bits per 32 with second terms
# (docs/lab/0001), and what docs/decisions/0005 says of the weights.
FORMATS = (
    Format("gguf F32", "F32", 1e-3),
    Format("gguf F16", "F16", 1e-3),
    Format("gguf BF16", "BF16", 1e-3),
    Format("gguf Q8_0", "Q8_0", 6e-3),
    Format("gguf Q4_0", "Q4_0", 6e-3),
    Format("gguf Q4_1", "Q4_1", 6e-3),
    Format("gguf Q5_0", "Q5_0", 6e-3),
    Format("gguf Q5_1", "Q5_1", 6e-3),
    Format("gguf Q4_K", "Q4_K", 6e-3),
    Format("gguf Q5_K", "Q5_K", 6e-3),
    Format("gguf Q6_K", "Q6_K", 6e-3),
    Format("awq g64", Packing("awq", group=64), 6e-3),
    Format("gptq g32", Packing("gptq", group=32), 6e-3),
    Format("gptq g64 act-order", Packing("gptq", group=64, is_ordered=True), 6e-3),
)


def write_format(gguf: Path, bf16_folder: Path, target: Path, stored: str | Packing) -> Path:
    """Writes the demo model as ``stored`` under ``target`` and returns what to open.

    Embedding and head stay Q8_0 in GGUF and BF16 in AWQ and GPTQ, as such files have them. A matrix whose rows are no
    multiple of 256 is written as Q8_0 in place of a type of K.
    """
    if isinstance(stored, Packing):
        return write_packed_folder(bf16_folder, target, stored)
    file = open_gguf(gguf)
    tensors = {}
    for name, tensor in file.tensors.items():
        kind = "F32" if len(tensor.shape) == 1 else "Q8_0" if name in ("token_embd.weight", "output.weight") else stored
        if kind.endswith("_K") and tensor.shape[-1] % SUPER_BLOCK:
            kind = "Q8_0"
        tensors[name] = encode(dequantise(tensor), kind)
    target.mkdir(parents=True, exist_ok=True)
    path = target / "model.gguf"
    path.write_bytes(gguf_bytes(_plain(file.metadata), tensors))
    return path


def _plain(metadata: Mapping[str, object]) -> dict[str, object]:
    # Booleans and numbers of other widths lose their width, which no reader here minds.
    return {key: value for key, value in metadata.items() if value != []}


def measure_format(gguf: Path, path: Path, *, positions: int, threads: int = 2) -> QualityReport:
    """Returns how far the served form of ``path`` is from its own exact path, on the text that ships."""
    windows = text_windows(open_model(gguf), shipped_text(), 512, positions)
    exact = Subject(path, dtype="fp32", threads=threads, sequences=1).distributions(windows)
    return compare(exact, Subject(path, threads=threads, sequences=1).distributions(windows))
