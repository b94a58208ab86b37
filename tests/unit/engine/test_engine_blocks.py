"""The block pool and the prefix cache."""

from __future__ import annotations

import numpy as np

from headrace.engine.blocks import BlockHash, BlockPool
from headrace.engine.prefix import HashChain, find_prefix


def name(text: str) -> BlockHash:
    return BlockHash(text.encode())


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_evictable, pool.num_used


def test_released_blocks_are_free_unless_they_were_published() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.publish(blocks[0], name("a"))

    pool.release(blocks)

    assert counts(pool) == (3, 1, 0)


def test_shared_block_stays_used_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.publish(block, name("a"))
    pool.share([block])

    pool.release([block])
    after_first = counts(pool)
    pool.release([block])

    assert after_first == (1, 0, 1)
    assert counts(pool) == (1, 1, 0)


def test_evictable_block_is_found_and_shared_again() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.publish(block, name("a"))
    pool.release([block])

    assert pool.find(name("a")) == block
    pool.share([block])

    assert counts(pool) == (1, 0, 1)


def test_longest_unused_block_is_evicted_first_and_chains_are_eaten_from_their_end() -> None:
    pool = BlockPool(3)
    old = pool.allocate(2)
    pool.publish(old[0], name("a0"))
    pool.publish(old[1], name("a1"))
    new = pool.allocate(1)
    pool.publish(new[0], name("b0"))
    pool.release(old)
    pool.release(new)

    pool.allocate(1)

    assert pool.find(name("a1")) is None
    assert pool.find(name("a0")) == old[0]
    assert pool.find(name("b0")) == new[0]


def test_second_block_with_the_same_content_stays_private() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, name("a"))
    pool.publish(second, name("a"))

    pool.release([second])

    assert pool.find(name("a")) == first
    assert counts(pool) == (1, 0, 1)


def test_withdrawn_content_is_never_found_again() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], name("a"))

    pool.withdraw(blocks)
    pool.release(blocks)

    assert pool.find(name("a")) is None
    assert counts(pool) == (1, 0, 0)


def chain_of(tokens: list[int], salt: str = "") -> HashChain:
    chain = HashChain(salt)
    chain.extend(np.array(tokens, np.int32), len(tokens))
    return chain


def test_chain_names_only_full_blocks_and_depends_on_all_tokens_before() -> None:
    first = chain_of(list(range(70)))
    other_start = chain_of([99, *range(1, 70)])

    assert len(first.hashes) == 2
    assert first.hashes[0] != other_start.hashes[0]
    assert first.hashes[1] != other_start.hashes[1]


def test_chain_extended_in_steps_equals_chain_made_at_once() -> None:
    tokens = np.arange(200, dtype=np.int32)
    stepwise = HashChain("s")
    for count in (5, 32, 33, 100, 200):
        stepwise.extend(tokens, count)

    assert stepwise.hashes == chain_of(list(range(200)), "s").hashes


def test_different_salts_share_nothing() -> None:
    tokens = list(range(64))

    assert not set(chain_of(tokens, "a").hashes) & set(chain_of(tokens, "b").hashes)


def test_a_full_hit_leaves_one_block_to_compute() -> None:
    pool = BlockPool(4)
    chain = chain_of(list(range(64)))
    blocks = pool.allocate(2)
    for block, block_hash in zip(blocks, chain.hashes, strict=True):
        pool.publish(block, block_hash)

    assert find_prefix(pool, chain, 64) == blocks[:1]
    assert find_prefix(pool, chain, 65) == blocks
