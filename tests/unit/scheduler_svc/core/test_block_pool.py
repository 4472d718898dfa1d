"""The block pool: references, the cache of unreferenced blocks, eviction order, and blocks that are safe for transfers."""

import pytest

from common.ids import BlockId, BlockKey, SeqId
from scheduler_svc.core.block_pool import BlockPool


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32))


def allocate(pool: BlockPool, num_blocks: int) -> list[BlockId]:
    block_ids = pool.allocate(num_blocks)
    assert block_ids is not None
    return block_ids


def cache(pool: BlockPool, num_blocks: int, first_key: int = 0) -> list[BlockId]:
    """Allocates a chain, lists it and lets go of it."""
    block_ids = allocate(pool, num_blocks)
    for i, block_id in enumerate(block_ids):
        assert pool.index.add(key(first_key + i), block_id)
    pool.release(block_ids)
    return block_ids


def test_unlisted_block_is_free_at_its_last_release() -> None:
    pool = BlockPool(4)
    (block_id,) = allocate(pool, 1)
    pool.retain(block_id)
    assert (pool.num_shared, pool.num_used) == (1, 1)

    pool.release([block_id])
    assert (pool.num_shared, pool.num_used, pool.num_free) == (0, 1, 3)
    pool.release([block_id])
    assert (pool.num_used, pool.num_free) == (0, 4)
    with pytest.raises(ValueError, match=f"block {block_id} "):
        pool.release([block_id])
    pool.check_integrity()


def test_listed_block_stays_for_prefix_hits() -> None:
    pool = BlockPool(4)
    block_ids = cache(pool, 2)

    assert (pool.num_used, pool.num_cached, pool.num_free, pool.num_available) == (0, 2, 2, 4)
    assert pool.num_cached_of(block_ids) == 2
    pool.retain(block_ids[0])
    assert (pool.num_used, pool.num_cached) == (1, 1)
    pool.check_integrity()


def test_eviction_takes_the_oldest_chain_from_its_end() -> None:
    pool = BlockPool(6)
    old, new = cache(pool, 3), cache(pool, 3, first_key=10)

    evicted = [allocate(pool, 1)[0] for _ in range(6)]

    assert evicted == old[::-1] + new[::-1]
    assert pool.allocate(1) is None
    pool.check_integrity()


def test_evicted_neighbours_are_a_run_again() -> None:
    pool = BlockPool(8)
    cache(pool, 8)

    assert allocate(pool, 4) == [4, 5, 6, 7]
    assert len(pool.index.match([key(i) for i in range(8)])) == 4


def test_used_again_is_evicted_later() -> None:
    pool = BlockPool(4)
    old, new = cache(pool, 2), cache(pool, 2, first_key=10)
    for block_id in old:
        pool.retain(block_id)
    pool.release(old)

    assert set(allocate(pool, 2)) == set(new)


def test_not_enough_blocks_change_nothing() -> None:
    pool = BlockPool(4)
    cache(pool, 2)
    allocate(pool, 1)

    assert pool.allocate(4) is None
    assert (pool.num_cached, pool.num_free) == (2, 1)


def test_blocks_follow_the_one_before_where_they_can() -> None:
    pool = BlockPool(16)
    first = allocate(pool, 3)

    assert pool.allocate(2, after=first[-1]) == [3, 4]
    assert pool.allocate(1, after=first[-1]) == [5]


def test_transfer_gets_no_block_that_a_step_may_touch() -> None:
    pool = BlockPool(8)
    pool.planned_step = 3
    touched = allocate(pool, 6)
    pool.release(touched)

    assert pool.allocate_settled(3, applied_step=2) is None
    assert pool.num_free == 8
    assert pool.allocate_settled(2, applied_step=2) == [6, 7]
    assert pool.allocate_settled(3, applied_step=3) == [0, 1, 2]
    pool.check_integrity()


def test_forgotten_block_serves_no_more_hits() -> None:
    pool = BlockPool(4)
    (cached,) = cache(pool, 1)
    (used,) = allocate(pool, 1)
    pool.index.add(key(5), used)

    pool.forget(cached)
    pool.forget(used)
    pool.forget(used)
    assert pool.index.match([key(0)]) == pool.index.match([key(5)]) == []
    assert (pool.num_free, pool.num_used) == (3, 1)
    pool.release([used])
    assert pool.num_free == 4


def test_flush_leaves_what_is_used() -> None:
    pool = BlockPool(4)
    cache(pool, 3)
    pool.retain(BlockId(0))

    assert pool.flush() == 2
    assert pool.index.match([key(i) for i in range(3)]) == [0]
    pool.check_integrity()


def test_save_takes_offered_blocks_unless_they_are_gone() -> None:
    pool = BlockPool(4)
    block_ids = cache(pool, 3)
    for i, block_id in enumerate(block_ids):
        pool.offer_save(key(i), block_id)
    pool.offer_save(key(9), block_ids[0])  # not what is listed
    pool.forget(block_ids[1])

    assert pool.take_unsaved(5) == [(key(0), block_ids[0]), (key(2), block_ids[2])]
    assert pool.take_unsaved(5) == []
    assert pool.num_used == 2


def test_key_keeps_its_first_block() -> None:
    pool = BlockPool(4)
    first, second = allocate(pool, 2)

    assert pool.index.add(key(1), first)
    assert not pool.index.add(key(1), second)
    assert pool.index.match([key(1), key(2)]) == [first]
    pool.release([second])
    assert pool.num_free == 3


def test_promise_is_withdrawn_by_its_owner_alone() -> None:
    index = BlockPool(1).index
    index.promise([key(1), key(2)], SeqId(1))
    index.promise([key(2), key(3)], None)

    index.withdraw([key(1), key(2), key(3)], SeqId(2))
    assert len(index.promised_by()) == 3
    index.withdraw([key(1), key(2), key(3)], SeqId(1))
    assert index.promised_by() == {key(3): None}
    assert index.is_promised(key(3))
