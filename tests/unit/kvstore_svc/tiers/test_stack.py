"""Tiers together: what is written flows down, what is read fills upward, and nothing unverified is handed out."""

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from common.clock import MonotonicClock
from common.degraded import DegradedPaths
from common.errors import StaleEpoch
from common.ids import BlockKey, Epoch, SessionId
from common.patience import Patience
from common.shm.checksum import checksum
from common.shm.slab import PAGE_BYTES
from kvstore_svc.core.block import Layout
from kvstore_svc.core.session import Lease, Session
from kvstore_svc.tiers.base import StoredBlock
from kvstore_svc.tiers.shm import ShmTier, create_slabs
from kvstore_svc.tiers.stack import Acquired, TierStack
from tests.unit.kvstore_svc.tiers.memory_tier import MemoryTier

BLOCK_BYTES = 2 * PAGE_BYTES
LAYOUT = Layout(b"a" * 32, BLOCK_BYTES)
EPOCH = Epoch(3)


@pytest.fixture
def shm() -> Iterator[ShmTier]:
    """Room for three blocks."""
    slabs = create_slabs(8 * PAGE_BYTES, 8 * PAGE_BYTES, EPOCH)
    with closing(ShmTier(slabs, EPOCH, session_ttl_s=10, quarantine_s=300)) as tier:
        yield tier


def make_stack(shm: ShmTier, *lower: MemoryTier) -> TierStack:
    return TierStack(shm, lower, clock=MonotonicClock(), degraded=DegradedPaths())


def open_session(shm: ShmTier) -> Session:
    return shm.store.open_session(SessionId("client"), "client", LAYOUT, now=0.0)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def data_of(number: int) -> bytes:
    return bytes([number]) * BLOCK_BYTES


def put_below(tier: MemoryTier, *numbers: int) -> None:
    for number in numbers:
        data = data_of(number)
        tier.blocks[key(number)] = (StoredBlock(key(number), LAYOUT, checksum(data)), bytearray(data))


def put_above(shm: ShmTier, session: Session, number: int) -> None:
    lease = shm.store.reserve(session, key(number))
    assert isinstance(lease, Lease)
    shm.view(lease.block)[:] = data_of(number)
    (measured,) = shm.measure([lease.block])
    generation = lease.block.place.generation
    assert shm.store.commit(session, lease.lease_id, generation=generation, claimed=checksum(data_of(number)), measured=measured)


async def write(stack: TierStack, session: Session, number: int) -> None:
    put_above(stack.shm, session, number)
    await stack.committed([key(number)])
    await stack.settle()


async def acquire(stack: TierStack, session: Session, *numbers: int, wait_s: float = 10.0) -> list[Acquired]:
    batches = stack.acquire(session, [key(n) for n in numbers], patience=Patience(wait_s), prefix_only=True)
    return [acquired async for batch in batches for acquired in batch]


async def test_what_was_evicted_comes_back_from_below_with_the_same_bytes(shm: ShmTier) -> None:
    tier = MemoryTier()
    stack, session = make_stack(shm, tier), open_session(shm)
    for number in range(1, 6):
        await write(stack, session, number)
    assert not shm.store.contains(key(1))

    (acquired,) = await acquire(stack, session, 1)

    assert acquired.tier == "disk"
    assert acquired.lease is not None
    assert bytes(shm.view(acquired.lease.block)) == data_of(1)
    (again,) = await acquire(stack, session, 1)
    assert (again.tier, tier.num_gets) == ("shm", 1)
    shm.store.check_integrity()


async def test_lookup_names_the_fastest_tier_of_each_leading_key(shm: ShmTier) -> None:
    disk, redis = MemoryTier("disk"), MemoryTier("redis")
    stack, session = make_stack(shm, disk, redis), open_session(shm)
    put_below(disk, 2)
    put_below(redis, 2, 3, 5)
    put_above(shm, session, 1)

    assert await stack.lookup([key(n) for n in (1, 2, 3, 4, 5)]) == ["shm", "disk", "redis"]
    assert await stack.lookup([]) == []


async def test_corrupt_bytes_from_below_are_a_miss_and_are_forgotten(shm: ShmTier) -> None:
    tier = MemoryTier()
    stack, session = make_stack(shm, tier), open_session(shm)
    put_below(tier, 1)
    tier.blocks[key(1)][1][77] ^= 1

    (acquired,) = await acquire(stack, session, 1)

    assert acquired.lease is None
    assert shm.store.counts.num_checksum_mismatches == 1
    assert key(1) not in tier.blocks
    assert shm.places.free_bytes == shm.places.capacity_bytes
    shm.store.check_integrity()


async def test_a_slow_tier_is_a_miss_in_time_and_fills_nevertheless(shm: ShmTier) -> None:
    tier = MemoryTier()
    stack, session = make_stack(shm, tier), open_session(shm)
    put_below(tier, 1)
    tier.gate.clear()

    (acquired,) = await acquire(stack, session, 1, wait_s=0.0)

    assert acquired.lease is None
    tier.gate.set()
    (acquired,) = await acquire(stack, session, 1)
    assert acquired.lease is not None
    assert tier.num_gets == 1


async def test_readers_of_one_block_share_one_read_from_below(shm: ShmTier) -> None:
    tier = MemoryTier()
    stack, session = make_stack(shm, tier), open_session(shm)
    put_below(tier, 1)

    results = await asyncio.gather(*(acquire(stack, session, 1) for _ in range(4)))

    assert tier.num_gets == 1
    assert all(acquired.lease is not None for (acquired,) in results)


async def test_what_is_ready_is_handed_out_before_the_wait_for_the_rest(shm: ShmTier) -> None:
    tier = MemoryTier()
    stack, session = make_stack(shm, tier), open_session(shm)
    put_above(shm, session, 1)
    put_below(tier, 2)
    tier.gate.clear()
    batches = stack.acquire(session, [key(1), key(2)], patience=Patience(10.0), prefix_only=True)

    first = await anext(batches)
    tier.gate.set()
    second = await anext(batches)

    assert [(a.key_index, a.tier) for a in first + second] == [(0, "shm"), (1, "disk")]


async def test_leases_come_in_groups_small_ones_first() -> None:
    num_blocks = 300
    with closing(ShmTier(create_slabs(4 << 20, 4 << 20, EPOCH), EPOCH, session_ttl_s=10, quarantine_s=300)) as shm:
        session, stack = open_session(shm), make_stack(shm)
        for number in range(num_blocks):
            lease = shm.store.reserve(session, key(number))
            assert isinstance(lease, Lease)
            shm.store.commit(session, lease.lease_id, generation=lease.block.place.generation, claimed=bytes(16))
        keys = [key(number) for number in range(num_blocks)]

        groups = [group async for group in stack.acquire(session, keys, patience=Patience(10.0), prefix_only=True)]

        assert [acquired.key_index for group in groups for acquired in group] == list(range(num_blocks))
        assert [len(group) for group in groups] == [16, 16, 32, 64, 128, 44]
        await stack.close()


async def test_a_prefix_ends_at_the_first_miss(shm: ShmTier) -> None:
    stack, session = make_stack(shm), open_session(shm)
    await write(stack, session, 1)
    await write(stack, session, 3)

    results = await acquire(stack, session, 1, 2, 3)

    assert [(a.key_index, a.lease is not None) for a in results] == [(0, True), (1, False)]


async def test_a_session_that_closes_during_a_fill_gets_no_lease_and_the_block_stays(shm: ShmTier) -> None:
    tier = MemoryTier()
    stack, session = make_stack(shm, tier), open_session(shm)
    put_below(tier, 1)
    tier.gate.clear()
    waiting = asyncio.create_task(acquire(stack, session, 1))
    await tier.asked.wait()
    shm.store.close_session(session)
    tier.gate.set()

    with pytest.raises(StaleEpoch):
        await waiting
    assert shm.store.contains(key(1))
    assert shm.store.num_leased_blocks == 0
    shm.store.check_integrity()


async def test_flipped_bits_in_shared_memory_are_found(shm: ShmTier) -> None:
    stack, session = make_stack(shm), open_session(shm)
    await write(stack, session, 1)
    (acquired,) = await acquire(stack, session, 1)
    assert acquired.lease is not None
    block = acquired.lease.block
    assert await stack.is_intact(block)

    shm.view(block)[5] ^= 0x80

    assert not await stack.is_intact(block)
    assert not shm.store.contains(key(1))
    assert shm.store.counts.num_checksum_mismatches == 1


async def test_closing_gives_back_what_fills_and_writes_down_hold(shm: ShmTier) -> None:
    tier = MemoryTier()
    stack, session = make_stack(shm, tier), open_session(shm)
    put_below(tier, 1)
    tier.gate.clear()
    await acquire(stack, session, 1, wait_s=0.0)

    await stack.close()

    assert shm.places.free_bytes == shm.places.capacity_bytes
    shm.store.check_integrity()


async def test_clear_empties_all_tiers(shm: ShmTier) -> None:
    tier = MemoryTier()
    stack, session = make_stack(shm, tier), open_session(shm)
    await write(stack, session, 1)
    put_below(tier, 2)

    assert await stack.clear(None) == (1, 0)
    assert tier.blocks == {}
