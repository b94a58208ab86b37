"""What is measured: the cells of the table, each the same token counts for every engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Kind(StrEnum):
    """How a cell's figure comes about."""

    DECODE = "decode"  # output tokens per second of one sequence, after its prompt
    PREFILL = "prefill"  # prompt tokens per second up to the first token
    BATCH = "batch"  # output tokens per second of all sequences together, prompts included in the time
    START = "start"  # seconds from the start of the process to the first token
    MEMORY = "memory"  # most bytes that the processes held at once, after the other cells
    ENCODE = "encode"  # texts per second, token ids in, pooled vectors out
    CLIENTS = "clients"  # texts per second over HTTP, that many clients with one text a request


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the summary.

    Args:
        sequences: prompts or texts at a time.
        prompt_tokens, output_tokens: of each.
    """

    name: str
    kind: Kind
    sequences: int = 1
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def unit(self) -> str:
        """What the figure counts."""
        match self.kind:
            case Kind.DECODE | Kind.PREFILL | Kind.BATCH:
                return "tok/s"
            case Kind.START:
                return "s"
            case Kind.MEMORY:
                return "MiB"
            case Kind.ENCODE | Kind.CLIENTS:
                return "texts/s"

    @property
    def is_less_better(self) -> bool:
        """Whether a lower figure is the better one."""
        return self.kind in (Kind.START, Kind.MEMORY)


def shrunk(cell: Cell, divisor: int) -> Cell:
    """Returns the cell with fewer tokens, to see whether everything runs; its figures mean nothing."""
    least = (min(cell.prompt_tokens, 8), min(cell.output_tokens, 8))
    prompt, output = (max(cell.prompt_tokens // divisor, least[0]), max(cell.output_tokens // divisor, least[1]))
    return replace(cell, prompt_tokens=prompt, output_tokens=output)


SMALL, LARGE, ENCODER = "smollm2-135m", "llama-1b", "minilm"
TITLES = {SMALL: "SmolLM2-135M-Instruct", LARGE: "Llama-3.2-1B shape, random weights", ENCODER: "all-MiniLM-L6-v2"}
PARAMETERS = {SMALL: 134_515_008, LARGE: 1_235_814_400, ENCODER: 22_713_216}
"""Values of all weights, the tied embedding counted once; bits per weight are bytes of the weight file over these."""

# In the order in which they run: the cheap ones first, since what they show tells how long the others will take.
CELLS: dict[str, tuple[Cell, ...]] = {
    SMALL: (
        Cell("decode c=1", Kind.DECODE, 1, 128, 64),
        Cell("prefill 512", Kind.PREFILL, 1, 512),
        Cell("start to first token", Kind.START),
        Cell("decode c=8", Kind.BATCH, 8, 128, 128),
        Cell("decode c=32", Kind.BATCH, 32, 128, 128),
        Cell("peak memory", Kind.MEMORY),
        Cell("decode at 4k", Kind.DECODE, 1, 4096, 32),
    ),
    # Fewer tokens in a batch than for the small model: a peer needs minutes for 128 in and 128 out here.
    LARGE: (
        Cell("decode c=1", Kind.DECODE, 1, 128, 32),
        Cell("prefill 512", Kind.PREFILL, 1, 512),
        Cell("start to first token", Kind.START),
        Cell("decode c=8", Kind.BATCH, 8, 32, 32),
        Cell("decode c=32", Kind.BATCH, 32, 16, 24),
        Cell("peak memory", Kind.MEMORY),
        Cell("decode at 4k", Kind.DECODE, 1, 4096, 16),
    ),
    ENCODER: (
        Cell("1 × 32 tokens", Kind.ENCODE, 1, 32),
        Cell("1 × 256 tokens", Kind.ENCODE, 1, 256),
        Cell("32 × 32 tokens", Kind.ENCODE, 32, 32),
        Cell("32 × 256 tokens", Kind.ENCODE, 32, 256),
        Cell("32 clients × 256 tokens, HTTP", Kind.CLIENTS, 32, 256),
        Cell("peak memory", Kind.MEMORY),
    ),
}
SUITES = {"decoders": (SMALL, LARGE), "encoders": (ENCODER,)}


def cache_tokens(model: str) -> int:
    """Returns the tokens that an engine holds at once in the largest cell, with a sixteenth to spare."""
    return max(cell.sequences * (cell.prompt_tokens + cell.output_tokens) for cell in CELLS[model]) * 17 // 16
