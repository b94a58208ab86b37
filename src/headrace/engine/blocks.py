"""The pool of KV blocks: who holds which, and which finished ones can still be found by their content.

Only numbers live here; the memory belongs to the VM. A block is in exactly one of three states, and the counts add up:

    free        holds nothing
    evictable   nobody uses it, but its content is published under a hash and can be shared again
    used        one or more sequences hold it (published or not)

    free + evictable + used = total

``allocate`` takes free blocks first, then evicts the evictable one that has been unused for longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NewType

BlockHash = NewType("BlockHash", bytes)


class BlockPool:
    """Counts references to ``total`` blocks (0 in models without pages) and remembers the content of published ones."""

    def __init__(self, total: int) -> None:
        assert total >= 0
        self.total = total
        self._free = list(range(total - 1, -1, -1))  # a stack: low numbers, hence warm pages, are used first
        self._num_holders = [0] * total
        self._hashes: list[BlockHash | None] = [None] * total
        self._published: dict[BlockHash, int] = {}
        # Unused published blocks, longest unused first. An ordered dict is a linked list with O(1) removal by key.
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Published blocks that nobody uses."""
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.total - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can give out."""
        return len(self._free) + len(self._evictable)

    def allocate(self, count: int) -> list[int]:
        """Gives ``count`` blocks, each with one holder. The caller has checked ``num_available``."""
        assert count <= self.num_available, f"{count} blocks asked, {self.num_available} available"
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _none = self._evictable.popitem(last=False)
                self._forget(block)
            self._num_holders[block] = 1
            blocks.append(block)
        return blocks

    def find(self, block_hash: BlockHash) -> int | None:
        """Returns the block with this content, or None. It may be evicted at the next ``allocate``: ``share`` it."""
        return self._published.get(block_hash)

    def is_evictable(self, block: int) -> bool:
        """Whether sharing this block takes it out of the available ones."""
        return block in self._evictable

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one holder to each published block."""
        for block in blocks:
            assert self._hashes[block] is not None
            self._evictable.pop(block, None)
            self._num_holders[block] += 1

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Lets others find a full, computed block. Where the content is published already, this one stays private."""
        assert self._num_holders[block] > 0
        if block_hash not in self._published and self._hashes[block] is None:
            self._published[block_hash] = block
            self._hashes[block] = block_hash

    def release(self, blocks: Iterable[int]) -> None:
        """Takes one holder from each block; ``blocks`` are in sequence order.

        The last block of a chain ages first: a chain is useful from its start, so it is eaten from its end.
        """
        for block in reversed(list(blocks)):
            self._num_holders[block] -= 1
            assert self._num_holders[block] >= 0, f"block {block} released too often"
            if self._num_holders[block] == 0:
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._evictable[block] = None

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Unpublishes blocks whose content is suspect (a failed computation); holders keep them."""
        for block in blocks:
            assert self._num_holders[block] > 0
            self._forget(block)

    def num_releasable(self, blocks: Iterable[int]) -> int:
        """Returns how many of these become available when one holder lets go of them all."""
        return sum(self._num_holders[block] == 1 for block in blocks)

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._published[block_hash]
            self._hashes[block] = None
