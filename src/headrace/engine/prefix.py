"""The prefix cache: names for the content of KV blocks, and the search for a prompt's longest known start.

A full block is named by SHA-256 over its parent's name and its own token ids. The first parent is the hash of the
request's salt, so equal prompts under different salts share nothing, and cannot be told apart by timing.
Collisions would mix conversations; 256 bits make them a non-event, which a fast non-cryptographic hash does not.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import numpy.typing as npt

from headrace.engine.blocks import BlockHash, BlockPool
from headrace.program.opcodes import BLOCK_TOKENS


class HashChain:
    """The names of one sequence's full blocks, extended as its tokens become known."""

    def __init__(self, salt: str) -> None:
        self._last = sha256(b"headrace prefix\0" + salt.encode()).digest()
        self.hashes: list[BlockHash] = []

    def extend(self, tokens: npt.NDArray[np.int32], num_tokens: int) -> None:
        """Names every block that ``tokens[:num_tokens]`` fills. Cost: ~1 µs for each new block."""
        for index in range(len(self.hashes), num_tokens // BLOCK_TOKENS):
            body = tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS].tobytes()
            self._last = sha256(self._last + body).digest()
            self.hashes.append(BlockHash(self._last))


def find_prefix(pool: BlockPool, chain: HashChain, num_tokens: int) -> list[int]:
    """Returns the published blocks of the sequence's longest known start, in order.

    At least one of its ``num_tokens`` is always left to compute: the next token is chosen from a computed row.
    """
    blocks: list[int] = []
    for block_hash in chain.hashes[: (num_tokens - 1) // BLOCK_TOKENS]:
        block = pool.find(block_hash)
        if block is None:
            break
        blocks.append(block)
    return blocks
