"""The way down is bounded, goes on behind the caller, and lets go of everything."""

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from common.clock import MonotonicClock
from common.degraded import DegradedPaths
from common.ids import BlockKey, Epoch, SessionId
from common.shm.checksum import checksum
from common.shm.slab import PAGE_BYTES
from kvstore_svc.core.admission import Admission
from kvstore_svc.core.block import Layout
from kvstore_svc.core.session import Lease, Session
from kvstore_svc.tiers.base import StoredBlock
from kvstore_svc.tiers.shm import ShmTier, create_slabs
from kvstore_svc.tiers.stack import TierStack
from kvstore_svc.tiers.write_behind import WriteBehind
from tests.unit.kvstore_svc.tiers.memory_tier import MemoryTier

LAYOUT = Layout(b"a" * 32, PAGE_BYTES)
EPOCH = Epoch(3)


class SlowTier(MemoryTier):
    """Writes when it is let; remembers in which order."""

    def __init__(self) -> None:
        super().__init__("disk")
        self.order: list[BlockKey] = []
        self.may_write = asyncio.Event()

    async def put(self, block: StoredBlock, data: memoryview) -> bool:
        await self.may_write.wait()
        self.order.append(block.key)
        return await super().put(block, data)


@pytest.fixture
def shm() -> Iterator[ShmTier]:
    """Room for twelve blocks, of which a quarter may be on its way."""
    with closing(ShmTier(create_slabs(14 * PAGE_BYTES, 14 * PAGE_BYTES, EPOCH), EPOCH, session_ttl_s=9, quarantine_s=9)) as tier:
        yield tier


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def commit(shm: ShmTier, session: Session, *numbers: int) -> list[BlockKey]:
    for number in numbers:
        lease = shm.store.reserve(session, key(number))
        assert isinstance(lease, Lease)
        shm.view(lease.block)[:] = bytes([number]) * PAGE_BYTES
        measured = checksum(shm.view(lease.block))
        generation = lease.block.place.generation
        assert shm.store.commit(session, lease.lease_id, generation=generation, claimed=measured, measured=measured)
    return [key(number) for number in numbers]


def open_session(shm: ShmTier) -> Session:
    name = f"client-{len(shm.store.sessions)}"
    return shm.store.open_session(SessionId(name), name, LAYOUT, now=0.0)


async def test_beyond_its_bytes_blocks_are_left_out_and_counted(shm: ShmTier) -> None:
    tier, session, degraded = SlowTier(), open_session(shm), DegradedPaths()
    behind = WriteBehind(shm, tier, open_session(shm), degraded)

    behind.offer(commit(shm, session, 1, 2, 3, 4, 5))

    assert behind.num_bytes <= shm.places.capacity_bytes // 4
    assert behind.num_blocks == shm.store.num_leased_blocks == 3
    assert degraded.counts["kvstore_write_down"] == 1
    tier.may_write.set()
    await behind.settle()
    assert set(tier.blocks) == {key(1), key(2), key(3)}, "the beginning of a chain is worth more than its end"
    assert shm.store.num_leased_blocks == behind.num_bytes == 0


async def test_beyond_its_blocks_too(shm: ShmTier) -> None:
    tier, degraded = SlowTier(), DegradedPaths()
    behind = WriteBehind(shm, tier, open_session(shm), degraded, max_blocks=2)

    behind.offer(commit(shm, open_session(shm), 1, 2, 3))

    assert behind.num_blocks == 2
    await behind.close()
    assert shm.store.num_leased_blocks == 0


async def test_the_end_of_a_chain_is_written_first_so_that_it_is_evicted_first(shm: ShmTier) -> None:
    tier = SlowTier()
    behind = WriteBehind(shm, tier, open_session(shm), DegradedPaths())

    behind.offer(commit(shm, open_session(shm), 1, 2, 3))
    tier.may_write.set()
    await behind.settle()

    assert tier.order == [key(3), key(2), key(1)]


async def test_a_block_that_is_on_its_way_is_not_taken_twice(shm: ShmTier) -> None:
    tier = SlowTier()
    behind = WriteBehind(shm, tier, open_session(shm), DegradedPaths())
    written = commit(shm, open_session(shm), 1)

    behind.offer(written)
    behind.offer(written)

    assert behind.num_blocks == 1
    tier.may_write.set()
    await behind.settle()
    assert tier.order == written


async def test_a_tier_with_an_admission_gets_what_is_used_again_and_once(shm: ShmTier) -> None:
    tier, session = SlowTier(), open_session(shm)
    tier.may_write.set()
    stack = TierStack(
        shm, [tier], clock=MonotonicClock(), degraded=DegradedPaths(), admission={"disk": Admission(2, max_keys=100)}
    )

    await stack.committed(commit(shm, session, 1, 2))
    await stack.settle()
    assert tier.order == []
    for _ in range(3):
        await stack.lookup([key(1)])
        await stack.settle()

    assert tier.order == [key(1)]
    await stack.close()
    shm.store.check_integrity()


async def test_clear_lets_go_of_what_waits(shm: ShmTier) -> None:
    tier, session = SlowTier(), open_session(shm)
    stack = TierStack(shm, [tier], clock=MonotonicClock(), degraded=DegradedPaths())
    await stack.committed(commit(shm, session, 1, 2, 3))
    tier.may_write.set()

    assert await stack.clear(None) == (3, 0)
    assert tier.blocks == {}
