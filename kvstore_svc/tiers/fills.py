"""Blocks on their way up from the lower tiers into shared memory: several at a time, in the order they are asked for.

Knows tiers, room in shared memory and verification. Does not know who asks, or for how long they are ready to wait.

Each tier has a window of reads of its own, so that a slow one holds up nobody who reads from a faster one. Readers who want one
block share its fill. A fill that nobody waits for any more ends, unless the tier is at work on it already: then it is completed,
and the next reader finds the block.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from common.clock import Clock
from common.ids import BlockKey
from kvstore_svc.core.block import Block, Layout
from kvstore_svc.core.block_store import Refusal
from kvstore_svc.core.session import Lease, Session
from kvstore_svc.tiers.base import FoundBlock, LowerTier
from kvstore_svc.tiers.meter import TierMeter
from kvstore_svc.tiers.shm import ShmTier

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How a tier is read.

    Attributes:
        window: most reads at a time.
        deadline_s: a reader that got nothing from the tier for so long goes without.
    """

    window: int = 8
    deadline_s: float = 0.2


class Lane:
    """One lower tier and the reads from it."""

    def __init__(self, tier: LowerTier, limits: ReadLimits):
        self.tier = tier
        self.limits = limits
        self.meter = TierMeter()
        self.slots = asyncio.Semaphore(limits.window)


@dataclass(slots=True, eq=False)
class Fill:
    """One block on its way up.

    Attributes:
        lane: the tier that is asked now.
        num_waiting: readers who wait for it.
        is_reading: the tier is at work on it.
        task: ends with the name of the tier that had the block; None: nobody had it, or there is no room.
    """

    key: BlockKey
    layout: Layout
    lane: Lane
    num_waiting: int = 0
    is_reading: bool = False
    task: "asyncio.Task[str | None]" = field(init=False)


class Fills:
    """See the module's first lines.

    Args:
        shm: where blocks go.
        own: the session that holds room for them.
        lanes: the lower tiers, fastest first.
        touch: told of blocks that came up.
        clock: for the meters.
    """

    def __init__(
        self,
        shm: ShmTier,
        own: Session,
        lanes: Sequence[Lane],
        touch: Callable[[Sequence[BlockKey]], Awaitable[None]],
        clock: Clock,
    ):
        self._shm = shm
        self._own = own
        self._lanes = lanes
        self._touch = touch
        self._clock = clock
        self._fills: dict[BlockKey, Fill] = {}

    def join(self, key: BlockKey, layout: Layout) -> Fill:
        """Begins to bring a block up, or shares in a fill that is under way. Ends with leave."""
        fill = self._fills.get(key)
        if fill is None:
            fill = self._fills[key] = Fill(key, layout, self._lanes[0])
            fill.task = asyncio.create_task(self._run(fill))
            fill.task.add_done_callback(lambda _: self._fills.pop(key, None))
        fill.num_waiting += 1
        return fill

    async def wait(self, fill: Fill, timeout_s: float) -> str | None:
        """Waits for a fill, no longer than timeout_s and than its tiers' deadlines.

        Returns:
            The tier that had the block; None: there is none, or not in time.
        """
        until_s = self._clock.now() + timeout_s
        while not fill.task.done():
            lane, left_s = fill.lane, until_s - self._clock.now()
            done, _ = await asyncio.wait([fill.task], timeout=max(0.0, min(left_s, lane.limits.deadline_s)))
            if done:
                break
            if left_s <= lane.limits.deadline_s:
                return None
            if fill.lane is lane:
                lane.meter.num_timeouts += 1
                return None
        return None if fill.task.cancelled() else fill.task.result()

    def leave(self, fill: Fill) -> None:
        """A reader waits no more."""
        fill.num_waiting -= 1
        if fill.num_waiting == 0 and not fill.is_reading:
            fill.task.cancel()
            if self._fills.get(fill.key) is fill:  # who asks before the task has ended must not share its end
                del self._fills[fill.key]

    async def close(self) -> None:
        """Ends all of them."""
        tasks = [fill.task for fill in self._fills.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, fill: Fill) -> str | None:
        store = self._shm.store
        lease: Lease | None = None
        try:
            for lane in self._lanes:
                if lane is not self._lanes[0] and fill.num_waiting == 0:
                    return None
                fill.lane, fill.is_reading = lane, False
                async with lane.slots:
                    if lease is None:
                        reserved = store.reserve(self._own, fill.key, fill.layout)
                        if isinstance(reserved, Refusal):
                            return None
                        lease = reserved
                    fill.is_reading = True
                    found = await self._read(lane, lease.block)
                if found is None:
                    continue
                claimed, generation = found.stored.checksum, lease.block.place.generation
                if store.commit(self._own, lease.lease_id, generation=generation, claimed=claimed, measured=found.measured):
                    lease = None
                    await self._touch([fill.key])
                    return lane.tier.name
                lease = None  # its room is free again
                lane.meter.num_verify_failures += 1
                log.error("block %s is corrupt in tier %s; dropped", fill.key.hex(), lane.tier.name)
                await lane.tier.evict(fill.key)
            return None
        finally:
            if lease is not None:
                store.abort(self._own, [lease.lease_id])

    async def _read(self, lane: Lane, block: Block) -> FoundBlock | None:
        started_s = self._clock.now()
        lane.meter.begin(started_s)
        found = None
        try:
            found = await lane.tier.get(block.key, self._shm.view(block))
        finally:
            num_bytes = None if found is None else block.layout.block_bytes
            lane.meter.end(started_s, self._clock.now(), num_bytes)
        return found
