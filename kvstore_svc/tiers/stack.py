"""All tiers as one: reads fill upward into shared memory, writes flow down in the background.

Knows the order of tiers and what is verified when. Does not know gRPC.

A block that comes up from below is verified before anybody gets it; one that fails is a miss and is forgotten below.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from common.clock import Clock
from common.degraded import DegradedPaths
from common.ids import BlockKey, SessionId
from common.patience import Patience
from kvstore_svc.core.admission import Admission
from kvstore_svc.core.block import Block, BlockState, Layout
from kvstore_svc.core.session import Lease, Session
from kvstore_svc.tiers.base import LowerTier
from kvstore_svc.tiers.fills import Fill, Fills, Lane, ReadLimits
from kvstore_svc.tiers.shm import ShmTier
from kvstore_svc.tiers.write_behind import WriteBehind

log = logging.getLogger(__name__)
# Of the store itself; no client has it, theirs are random.
OWN_SESSION = SessionId("store")
# Blocks of one call that are on their way up, or held, before their turn.
_AHEAD = 16
# At the start fewer, so that they do not slow down the first one, which decides whether there is time for the others.
_AHEAD_AT_FIRST = 2
# Leases go out in groups, small ones first, so that whoever copies can begin with the first.
_FIRST_GROUP = 16
_LARGEST_GROUP = 128
DEFAULT_LOOKUP_WAIT_S = 0.03
# Hashing this many bytes on the event loop costs less than handing them to a thread.
_INLINE_HASH_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Acquired:
    """What became of one key: the lease and the tier it was found in; None: a miss."""

    key_index: int
    lease: Lease | None
    tier: str


class TierStack:
    """Shared memory above any number of lower tiers.

    Args:
        shm: the tier that clients read and write.
        lower: the others, fastest first.
        clock: for deadlines.
        degraded: counts what was not written down.
        admission: by the name of a lower tier, which blocks are worth writing to it; without: those that are new.
        limits: by the name of a lower tier, how it is read.

    Attributes:
        lanes: the lower tiers with the figures of their reads.
    """

    def __init__(
        self,
        shm: ShmTier,
        lower: Sequence[LowerTier],
        *,
        clock: Clock,
        degraded: DegradedPaths,
        admission: Mapping[str, Admission] | None = None,
        limits: Mapping[str, ReadLimits] | None = None,
    ):
        self.shm = shm
        self.lower = tuple(lower)
        self.degraded = degraded
        self._clock = clock
        # Blocks on their way up or down are held by this session, which has no process behind it and never expires.
        self._own = shm.store.open_session(OWN_SESSION, "store", Layout(b"", 0), inf)
        admission = admission or {}
        down = [WriteBehind(shm, tier, self._own, degraded) for tier in self.lower]
        self._new_down = [behind for behind in down if behind.tier.name not in admission]
        self._touched_down = [(behind, admission[behind.tier.name]) for behind in down if behind.tier.name in admission]
        self._down = down
        self._touching: set[asyncio.Task[None]] = set()
        self.lanes = [Lane(tier, (limits or {}).get(tier.name, ReadLimits())) for tier in self.lower]
        self._fills = Fills(shm, self._own, self.lanes, self.touch, clock)

    async def lookup(self, keys: Sequence[BlockKey], max_wait_s: float = DEFAULT_LOOKUP_WAIT_S) -> list[str]:
        """Names of the tiers of the leading keys that are present.

        Args:
            keys: of a chain.
            max_wait_s: a tier that has not said by then what it has, has nothing: a look-up is in the way of a request.
        """
        found: list[str] = []
        for key in keys:
            if not self.shm.store.contains(key):
                break
            found.append(self.shm.name)
        self._touch_soon(keys[: len(found)])
        if not self.lower or len(found) == len(keys):
            return found
        rest = keys[len(found) :]
        below = await asyncio.gather(*(self._contains(lane, rest, max_wait_s) for lane in self.lanes))
        for position, key in enumerate(rest):
            if self.shm.store.contains(key):
                found.append(self.shm.name)
                continue
            name = next((t.name for t, present in zip(self.lower, below, strict=True) if present[position]), None)
            if name is None:
                break
            found.append(name)
        return found

    async def _contains(self, lane: Lane, keys: Sequence[BlockKey], max_wait_s: float) -> list[bool]:
        """What a tier says it has; nothing, if it does not say so in time."""
        try:
            async with asyncio.timeout(max_wait_s):
                return await lane.tier.contains(keys)
        except TimeoutError:
            lane.meter.num_timeouts += 1
            return [False] * len(keys)

    async def acquire(
        self, session: Session, keys: Sequence[BlockKey], *, patience: Patience, prefix_only: bool
    ) -> AsyncGenerator[list[Acquired], None]:
        """Read leases in the order of the keys, in groups, as soon as each group is in shared memory.

        Args:
            session: who reads.
            keys: of the blocks.
            patience: blocks that are not in shared memory by then are misses.
            prefix_only: end at the first miss, which is part of the answer.
        """
        started_s, num_acquired = self._clock.now(), 0
        self._touch_soon(keys)
        ready: list[Acquired] = []
        ahead: deque[Lease | Fill | None] = deque()
        following = iter(keys)
        try:
            for index in range(len(keys)):
                num_ahead = min(_AHEAD, _AHEAD_AT_FIRST + index) - len(ahead)
                ahead.extend(self._begin(session, key) for key in itertools.islice(following, num_ahead))
                begun = ahead[0]
                lease, tier = (begun, self.shm.name) if isinstance(begun, Lease) else (None, "")
                if isinstance(begun, Fill):
                    if ready and not begun.task.done():
                        yield ready
                        ready = []
                    left_s = started_s + patience.seconds(num_acquired) - self._clock.now()
                    filled_from = await self._fills.wait(begun, left_s)
                    block = self.shm.store.committed_block(begun.key)
                    if block is not None:
                        lease, tier = self.shm.store.hold(session, block), filled_from or self.shm.name
                    self._fills.leave(begun)
                ahead.popleft()
                ready.append(Acquired(index, lease, tier))
                num_acquired += lease is not None
                if lease is None and prefix_only:
                    break
                if len(ready) >= min(_LARGEST_GROUP, max(_FIRST_GROUP, index + 1 - len(ready))):
                    yield ready
                    ready = []
            if ready:
                yield ready
        finally:
            for begun in ahead:
                if isinstance(begun, Fill):
                    self._fills.leave(begun)
                elif begun is not None:
                    self.shm.store.release(session, [begun.lease_id])

    async def prefetch(self, layout: Layout, keys: Sequence[BlockKey]) -> AsyncGenerator[str, None]:
        """Brings leading blocks up into shared memory for somebody who will ask for them; holds none of them.

        Yields:
            The tier that each was in, in order; ends at the first that is in none or does not come in its tier's time.
        """
        ahead: deque[Fill | None] = deque()
        following = iter(keys)
        try:
            for key in keys:
                for other in itertools.islice(following, _AHEAD - len(ahead)):
                    is_here = self.shm.store.contains(other) or not self.lower
                    ahead.append(None if is_here else self._fills.join(other, layout))
                fill = ahead[0]
                name = await self._fills.wait(fill, inf) if fill is not None else None
                if fill is not None:
                    self._fills.leave(fill)
                ahead.popleft()
                if not self.shm.store.contains(key):
                    return
                yield name or self.shm.name
        finally:
            for fill in ahead:
                if fill is not None:
                    self._fills.leave(fill)

    def _begin(self, session: Session, key: BlockKey) -> Lease | Fill | None:
        """A lease, if the block is here, or the fill that may bring it."""
        lease = self.shm.store.acquire(session, key)
        return lease if lease is not None or not self.lower else self._fills.join(key, session.layout)

    async def measure(self, blocks: list[Block]) -> list[bytes]:
        """Checksums of the blocks' bytes; other calls go on meanwhile."""
        if sum(block.layout.block_bytes for block in blocks) <= _INLINE_HASH_BYTES:
            return self.shm.measure(blocks)
        return await asyncio.to_thread(self.shm.measure, blocks)

    async def is_intact(self, block: Block) -> bool:
        """Verifies a leased block; one that fails is dropped, counted and forgotten."""
        (measured,) = await self.measure([block])
        if measured == block.checksum:
            return True
        if block.state is BlockState.COMMITTED:
            log.error("block %s is corrupt in shared memory; dropped", block.key.hex())
        self.shm.store.drop_corrupt(block)
        return False

    async def committed(self, keys: Sequence[BlockKey]) -> None:
        """Starts to write new blocks down, as far as they are worth it and their queues have room."""
        for behind in self._new_down:
            behind.offer(keys)
        await self.touch(keys)

    def _touch_soon(self, keys: Sequence[BlockKey]) -> None:
        """As touch, of those that are here, but the caller does not wait: whoever asked for them does."""
        if self._touched_down:
            task = asyncio.create_task(self.touch([key for key in keys if self.shm.store.contains(key)]))
            self._touching.add(task)
            task.add_done_callback(self._touching.discard)

    async def touch(self, keys: Sequence[BlockKey]) -> None:
        """Somebody uses these blocks of a chain: those that have become worth it are written down."""
        for behind, admission in self._touched_down:
            worthy = admission.touch(keys)
            if worthy:
                is_below = await behind.tier.contains(worthy)
                behind.offer([key for key, below in zip(worthy, is_below, strict=True) if not below])

    async def write_down(self, keys: Sequence[BlockKey], name: str) -> None:
        """Writes blocks of shared memory to one tier, whether or not they are worth it, and waits for that."""
        behind = next(behind for behind in self._down if behind.tier.name == name)
        for key in keys:
            if behind.is_half_full:
                await behind.settle()
            behind.offer([key])
        await behind.settle()

    async def settle(self) -> None:
        """Waits for all writes down that have begun."""
        await asyncio.gather(*self._touching)
        for behind in self._down:
            await behind.settle()

    async def clear(self, fingerprint: bytes | None) -> tuple[int, int]:
        """Drops every block that nobody holds, in all tiers; returns (num_dropped, num_kept) of shared memory."""
        for behind in self._down:
            behind.forget()
            await behind.settle()
        for tier in self.lower:
            await tier.clear(fingerprint)
        return self.shm.store.clear(fingerprint)

    async def close(self) -> None:
        """Ends the background work."""
        await self._fills.close()
        await asyncio.gather(*self._touching)
        for behind in self._down:
            await behind.close()
