"""Reads of lower tiers overlap, keep their order, wait no longer than they may, and end when nobody wants them."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, closing

import pytest

from common.clock import MonotonicClock
from common.degraded import DegradedPaths
from common.ids import BlockKey, Epoch, SessionId
from common.patience import Patience
from common.shm.checksum import checksum
from common.shm.slab import PAGE_BYTES
from kvstore_svc.core.block import Layout
from kvstore_svc.core.session import Session
from kvstore_svc.tiers.base import FoundBlock, StoredBlock
from kvstore_svc.tiers.fills import ReadLimits
from kvstore_svc.tiers.shm import ShmTier, create_slabs
from kvstore_svc.tiers.stack import Acquired, TierStack
from tests.unit.kvstore_svc.tiers.memory_tier import MemoryTier

LAYOUT = Layout(b"a" * 32, PAGE_BYTES)
EPOCH = Epoch(3)


class CountingTier(MemoryTier):
    """Counts the reads that are under way; a read of a key in `stuck` never ends by itself."""

    def __init__(self, name: str = "disk"):
        super().__init__(name)
        self.num_reading = self.most_reading = 0
        self.order: list[BlockKey] = []
        self.stuck: set[BlockKey] = set()

    async def get(self, key: BlockKey, into: memoryview) -> FoundBlock | None:
        self.order.append(key)
        self.num_reading += 1
        self.most_reading = max(self.most_reading, self.num_reading)
        try:
            if key in self.stuck:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            return await super().get(key, into)
        finally:
            self.num_reading -= 1


@pytest.fixture
def shm() -> Iterator[ShmTier]:
    """Room for sixty blocks."""
    slabs = create_slabs(64 * PAGE_BYTES, 64 * PAGE_BYTES, EPOCH)
    with closing(ShmTier(slabs, EPOCH, session_ttl_s=10, quarantine_s=300)) as tier:
        yield tier


def make_stack(shm: ShmTier, *lower: MemoryTier, limits: ReadLimits | None = None) -> TierStack:
    by_name = {tier.name: limits for tier in lower} if limits is not None else {}
    return TierStack(shm, lower, clock=MonotonicClock(), degraded=DegradedPaths(), limits=by_name)


def open_session(shm: ShmTier) -> Session:
    return shm.store.open_session(SessionId("client"), "client", LAYOUT, now=0.0)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def put_below(tier: MemoryTier, *numbers: int) -> None:
    for number in numbers:
        data = bytes([number]) * PAGE_BYTES
        tier.blocks[key(number)] = (StoredBlock(key(number), LAYOUT, checksum(data)), bytearray(data))


async def acquire(stack: TierStack, session: Session, numbers: range, patience: Patience) -> list[Acquired]:
    batches = stack.acquire(session, [key(n) for n in numbers], patience=patience, prefix_only=True)
    return [acquired async for batch in batches for acquired in batch]


async def test_reads_overlap_up_to_the_window_and_blocks_come_in_order(shm: ShmTier) -> None:
    tier = CountingTier()
    stack, session = make_stack(shm, tier, limits=ReadLimits(window=4, deadline_s=10.0)), open_session(shm)
    put_below(tier, *range(1, 31))

    results = await acquire(stack, session, range(1, 31), Patience(20.0))

    assert [r.key_index for r in results] == list(range(30)) and all(r.tier == "disk" for r in results)
    assert tier.order == [key(n) for n in range(1, 31)]
    assert 2 <= tier.most_reading <= 4
    meter = stack.lanes[0].meter
    assert (meter.num_reads, meter.read_bytes, meter.num_timeouts) == (30, 30 * PAGE_BYTES, 0)
    assert meter.read_s > 0 and meter.latency_s > 0
    shm.store.check_integrity()


async def test_a_tier_that_gives_nothing_for_its_deadline_is_given_up_and_counted(shm: ShmTier) -> None:
    tier = CountingTier()
    stack, session = make_stack(shm, tier, limits=ReadLimits(window=2, deadline_s=0.02)), open_session(shm)
    put_below(tier, *range(1, 10))
    tier.stuck = {key(3)}

    results = await acquire(stack, session, range(1, 10), Patience(20.0))

    assert [r.lease is not None for r in results] == [True, True, False]
    assert stack.lanes[0].meter.num_timeouts == 1
    await stack.close()
    shm.store.check_integrity()


async def test_a_stuck_tier_does_not_hold_up_who_reads_from_another(shm: ShmTier) -> None:
    disk, redis = CountingTier("disk"), CountingTier("redis")
    stack, session = make_stack(shm, disk, redis, limits=ReadLimits(window=2, deadline_s=10.0)), open_session(shm)
    put_below(redis, *range(1, 9))
    redis.stuck = {key(n) for n in range(1, 9)}
    put_below(disk, *range(11, 19))
    waiting = asyncio.create_task(acquire(stack, session, range(1, 9), Patience(20.0)))
    while redis.num_reading < 2:
        await asyncio.sleep(0)

    results = await acquire(stack, session, range(11, 19), Patience(20.0))

    assert all(r.tier == "disk" for r in results) and len(results) == 8
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await stack.close()
    shm.store.check_integrity()


async def test_each_block_that_comes_makes_the_wait_for_the_next_worth_while(shm: ShmTier) -> None:
    tier = CountingTier()
    stack, session = make_stack(shm, tier), open_session(shm)
    put_below(tier, *range(1, 5))
    tier.gate.clear()

    assert len(await acquire(stack, session, range(1, 5), Patience(0.0, 0.0))) == 1  # the first is a miss already
    tier.gate.set()
    assert all(r.lease is not None for r in await acquire(stack, session, range(1, 5), Patience(10.0, 10.0)))
    await stack.close()


async def test_what_nobody_waits_for_and_no_tier_works_on_is_given_up(shm: ShmTier) -> None:
    tier = CountingTier()
    stack, session = make_stack(shm, tier, limits=ReadLimits(window=1, deadline_s=10.0)), open_session(shm)
    put_below(tier, *range(1, 9))
    tier.gate.clear()

    await acquire(stack, session, range(1, 9), Patience(0.0))
    tier.gate.set()
    for _ in range(50):
        await asyncio.sleep(0)

    assert tier.order == [key(1)]
    assert shm.store.contains(key(1)) and not shm.store.contains(key(2))
    assert shm.store.num_leased_blocks == 0
    shm.store.check_integrity()


async def test_blocks_that_wait_for_their_turn_are_not_evicted_by_those_that_come_up(shm: ShmTier) -> None:
    """Sixty places: forty blocks are above, forty below; the chain takes them in turns."""
    tier = CountingTier()
    stack, session = make_stack(shm, tier), open_session(shm)
    put_below(tier, *range(1, 41))
    async with aclosing(stack.prefetch(LAYOUT, [key(n) for n in range(2, 41, 2)])) as names:
        assert [name async for name in names] == ["disk"] * 20

    results = await acquire(stack, session, range(1, 41), Patience(20.0))

    assert [r.tier for r in results] == ["disk", "shm"] * 20
    shm.store.check_integrity()


async def test_a_prefetch_holds_nothing_and_ends_at_the_first_block_that_is_nowhere(shm: ShmTier) -> None:
    tier = CountingTier()
    stack = make_stack(shm, tier)
    put_below(tier, 1, 2, 4)

    async with aclosing(stack.prefetch(LAYOUT, [key(n) for n in (1, 2, 3, 4)])) as names:
        assert [name async for name in names] == ["disk", "disk"]

    assert shm.store.num_leased_blocks == 0 or await _settled(stack)
    await stack.close()
    shm.store.check_integrity()


async def _settled(stack: TierStack) -> bool:
    """Fills that were under way end by themselves."""
    for _ in range(50):
        await asyncio.sleep(0)
    return stack.shm.store.num_leased_blocks == 0


async def test_wrong_bytes_in_one_tier_are_made_good_by_the_next(shm: ShmTier) -> None:
    disk, redis = CountingTier("disk"), CountingTier("redis")
    stack, session = make_stack(shm, disk, redis), open_session(shm)
    put_below(disk, 1)
    put_below(redis, 1)
    disk.blocks[key(1)][1][7] ^= 1

    (acquired,) = await acquire(stack, session, range(1, 2), Patience(20.0))

    assert acquired.tier == "redis"
    assert key(1) not in disk.blocks
    assert [lane.meter.num_verify_failures for lane in stack.lanes] == [1, 0]
    shm.store.check_integrity()


async def test_a_tier_that_does_not_answer_a_look_up_in_time_has_nothing(shm: ShmTier) -> None:
    class Silent(CountingTier):
        async def contains(self, keys: object) -> list[bool]:
            await asyncio.Event().wait()
            return []

    disk, redis = CountingTier("disk"), Silent("redis")
    stack = make_stack(shm, disk, redis)
    put_below(disk, 1)

    assert await stack.lookup([key(1), key(2)], 0.01) == ["disk"]
    assert stack.lanes[1].meter.num_timeouts == 1
