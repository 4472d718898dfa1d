"""Blocks of turns that are expected come up before them, as far as there is room and nobody else needs the store."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.clock import ManualClock
from common.degraded import DegradedPaths
from octavo.kvstore.v1 import kv_store_service_pb2 as kvstore_pb
from scheduler_svc.engine import Engine
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.prewarmer import Prewarmer
from tests.unit.scheduler_svc.scripted_executor import RecordedOutput, ScriptedExecutor, ScriptedStore, make_request, settle


class MeasuredStore(ScriptedStore):
    """A block store with shared memory of so many bytes."""

    capacity_bytes = 100_000

    async def stats(self) -> kvstore_pb.GetStatsResponse:
        tier = kvstore_pb.TierStats(tier=kvstore_pb.TIER_SHM, capacity_bytes=self.capacity_bytes)
        disk = kvstore_pb.TierStats(tier=kvstore_pb.TIER_DISK, capacity_bytes=1 << 40)
        return kvstore_pb.GetStatsResponse(tiers=[tier, disk])


class Rig:
    """An engine whose executor answers at once, in a world where everybody comes again after ten seconds."""

    def __init__(self, store: MeasuredStore, executor: ScriptedExecutor):
        self.store = store
        self.clock = ManualClock(1000.0)
        self.executor = executor
        self.engine = Engine([executor], EngineConfig(), self.clock, store, DegradedPaths())
        self.prewarmer = Prewarmer(self.engine, store, self.clock, 0.5)

    async def turn(self, user: int, turn: int) -> None:
        prompt = [user + 1] * (4 + 4 * turn)
        await self.engine.submit(make_request(f"{user}.{turn}", prompt=prompt, max_tokens=1), RecordedOutput())
        await settle()
        link = self.executor.links[0]
        await link.answer(link.plans[-1], 9)

    async def teach(self) -> None:
        for user in range(10):
            await self.turn(user, 1)
        self.clock.advance(10.0)
        for user in range(10):
            await self.turn(user, 2)
        self.engine.flush_cache()  # nothing is on the device any more
        self.store.asked.clear()
        self.store.prefetched.clear()


@asynccontextmanager
async def rig(tiers: list[str]) -> AsyncIterator[Rig]:
    made = Rig(MeasuredStore(tiers), ScriptedExecutor(num_blocks=256, max_num_seqs=16))
    await made.engine.start()
    await settle()
    await made.teach()
    yield made
    await made.engine.stop()


async def test_blocks_of_a_turn_that_is_expected_come_up_before_it() -> None:
    async with rig(["disk", "disk", "disk"]) as r:
        r.clock.advance(5.0)
        await r.prewarmer.look()
        assert [len(keys) for keys in r.store.prefetched] == [3]
        assert r.store.prefetched == r.store.asked
        assert r.prewarmer.num_blocks == 3
        r.clock.advance(5.0)
        await r.turn(0, 3)
        assert r.engine.turns.num_warm_used == 1


async def test_each_is_brought_up_once_and_one_after_another() -> None:
    async with rig(["disk", "disk", "disk"]) as r:
        r.clock.advance(5.0)
        for _ in range(12):
            await r.prewarmer.look()
        assert len(r.store.prefetched) == 10
        assert len({keys[0] for keys in r.store.prefetched}) == 10


async def test_what_is_up_already_is_not_read() -> None:
    async with rig(["shm", "shm", "disk"]) as r:
        r.clock.advance(5.0)
        await r.prewarmer.look()
        assert r.store.prefetched == [r.store.asked[0][2:]]


async def test_no_more_comes_up_than_there_is_room_for() -> None:
    async with rig(["disk", "disk", "disk"]) as r:
        r.store.capacity_bytes = 2 * 2 * 300  # a half of it holds two conversations of three blocks of a hundred bytes
        r.clock.advance(5.0)
        for _ in range(5):
            await r.prewarmer.look()
        assert len(r.store.prefetched) == 2


async def test_nothing_comes_up_when_nobody_is_expected() -> None:
    async with rig(["disk", "disk", "disk"]) as r:
        r.clock.advance(500.0)
        await r.prewarmer.look()
        assert r.store.prefetched == [] and r.store.asked == []


async def test_a_store_that_has_nothing_is_asked_once() -> None:
    async with rig([]) as r:
        r.clock.advance(5.0)
        for _ in range(12):
            await r.prewarmer.look()
        assert r.store.prefetched == [] and len(r.store.asked) == 10
