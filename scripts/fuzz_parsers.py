"""The fuzz target behind ``scripts/fuzz``: a parser may return or raise ModelFormatError; anything else is a finding.

The first byte of an input chooses how the rest is used, so that the fuzzer reaches behind length fields and checks that
random bytes seldom pass.
"""

from __future__ import annotations

import resource
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["headrace.registry", "json"]):
    import numpy as np

    from headrace.base.errors import ModelFormatError
    from headrace.registry.formats.gguf import parse_gguf
    from headrace.registry.formats.gguf_vocabulary import check_vocabulary
    from headrace.registry.formats.safetensors import parse_safetensors

from headrace.testing.tiny import write_tiny_gguf, write_tiny_llama
from headrace.testing.tiny_blocks import encode
from headrace.testing.tiny_files import gguf_bytes, safetensors_bytes

PATH = Path("model")
MAX_CPU_S = 1.0
MAX_BYTES = 256 * 2**20


class Limits:
    """Runs a target and fails an input that takes too much; CPU time, because the machine may be busy."""

    def __init__(self, target: Callable[[bytes], None]) -> None:
        self._target = target
        self._peak_bytes = self._peak_now()
        self.most_s = 0.0
        self.most_bytes = 0

    @staticmethod
    def _peak_now() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def __call__(self, data: bytes) -> None:
        started_at_s = time.process_time()
        self._target(data)
        taken_s = time.process_time() - started_at_s
        peak_bytes = self._peak_now()
        grown, self._peak_bytes = peak_bytes - self._peak_bytes, peak_bytes
        if taken_s > self.most_s or grown > self.most_bytes:
            self.most_s, self.most_bytes = max(taken_s, self.most_s), max(grown, self.most_bytes)
            sys.stderr.write(
                f"most so far: {self.most_s:.3f} s of CPU, {self.most_bytes / 2**20:.1f} MiB by one input\n"
            )
        assert taken_s <= MAX_CPU_S, f"took {taken_s:.2f} s of CPU"
        assert grown <= MAX_BYTES, f"took {grown / 2**20:.0f} MiB"


def check_message(message: str) -> None:
    """A message may quote the file, but must neither drive a terminal nor flood a log."""
    assert message.isprintable(), message
    assert len(message) < 2000, message


def fuzz_safetensors(data: bytes) -> None:
    """Mode even: the file as it is. Mode odd: the rest is header text (up to a zero byte) and data."""
    if not data:
        return
    content = data[1:]
    if data[0] & 1:
        text, _, body = content.partition(b"\0")
        content = struct.pack("<Q", len(text)) + text + body
    try:
        parse_safetensors(memoryview(content), PATH)
    except ModelFormatError as error:
        check_message(error.message)


def fuzz_gguf(data: bytes) -> None:
    """Mode even: the file as it is. Mode odd: magic and version are put in front, and 64 KiB of data behind."""
    if not data:
        return
    content = data[1:]
    if data[0] & 1:
        content = b"GGUF\x03\0\0\0" + content + bytes(65_536)
    try:
        parsed = parse_gguf(memoryview(content), PATH)
        check_vocabulary(parsed.metadata, PATH)
    except ModelFormatError as error:
        check_message(error.message)


def seeds(target: str) -> list[bytes]:
    """Returns small honest files to start from, in both modes."""
    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    tensors = {"a.weight": encode(values, "F32"), "b.weight": encode(values, "Q8_0" if target == "gguf" else "BF16")}
    with tempfile.TemporaryDirectory() as folder:
        if target == "gguf":
            tiny = write_tiny_gguf(Path(folder) / "m.gguf", layers=1, vocab_size=262).read_bytes()[:16_000]
            metadata: dict[str, object] = {
                "general.architecture": "llama",
                "general.alignment": 32,
                "a.scores": [0.5, 1.5],
            }
            metadata |= {"tokenizer.ggml.tokens": ["<0x0A>", "a", "b", "ab"], "tokenizer.ggml.merges": ["a b"]}
            metadata |= {"tokenizer.ggml.token_type": [6, 1, 1, 1], "tokenizer.ggml.eos_token_id": 1}
            small = gguf_bytes(metadata, tensors)
            return [b"\0" + small, b"\1" + small[8:], b"\0" + tiny]
        tiny = (write_tiny_llama(Path(folder), layers=1) / "model.safetensors").read_bytes()
        small = safetensors_bytes(tensors, {"format": "pt"})
        size = 8 + int.from_bytes(small[:8], "little")
        return [b"\0" + small, b"\1" + small[8:size] + b"\0" + small[size:], b"\0" + tiny[:16_000]]


def main() -> None:
    """Writes the seeds into the corpus folder and fuzzes until libFuzzer's limits end it."""
    target = sys.argv.pop(1)
    corpus = Path(sys.argv[1])
    for index, seed in enumerate(seeds(target)):
        (corpus / f"seed-{index}").write_bytes(seed)
    atheris.Setup(sys.argv, Limits(fuzz_gguf if target == "gguf" else fuzz_safetensors))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
