"""All tiers as one: reads fill upward into shared memory, writes flow down in the background.

Knows the order of tiers and what is verified when. Does not know gRPC.

A block that comes up from below is verified before anybody gets it; one that fails is a miss and is forgotten below.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from common.clock import Clock
from common.degraded import DegradedPaths
from common.ids import BlockKey, SessionId
from common.shm.checksum import checksum
from kvstore_svc.core.admission import Admission
from kvstore_svc.core.block import Block, BlockState, Layout
from kvstore_svc.core.block_store import Refusal
from kvstore_svc.core.session import Lease, Session
from kvstore_svc.tiers.base import LowerTier, StoredBlock
from kvstore_svc.tiers.shm import ShmTier
from kvstore_svc.tiers.write_behind import WriteBehind

log = logging.getLogger(__name__)
# Of the store itself; no client has it, theirs are random.
OWN_SESSION = SessionId("store")
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
    """

    def __init__(
        self,
        shm: ShmTier,
        lower: Sequence[LowerTier],
        *,
        clock: Clock,
        degraded: DegradedPaths,
        admission: Mapping[str, Admission] | None = None,
    ):
        self.shm = shm
        self.lower = tuple(lower)
        self.degraded = degraded
        self._clock = clock
        # Blocks on their way up or down are held by this session, which has no process behind it and never expires.
        self._own = shm.store.open_session(OWN_SESSION, "store", Layout(b"", 0), inf)
        self._filling: dict[BlockKey, asyncio.Task[str | None]] = {}
        admission = admission or {}
        down = [WriteBehind(shm, tier, self._own, degraded) for tier in self.lower]
        self._new_down = [behind for behind in down if behind.tier.name not in admission]
        self._touched_down = [(behind, admission[behind.tier.name]) for behind in down if behind.tier.name in admission]
        self._down = down

    async def lookup(self, keys: Sequence[BlockKey]) -> list[str]:
        """Names of the tiers of the leading keys that are present."""
        found: list[str] = []
        for key in keys:
            if not self.shm.store.contains(key):
                break
            found.append(self.shm.name)
        if self._touched_down:
            await self.touch(keys[: len(found)])
        if not self.lower or len(found) == len(keys):
            return found
        rest = keys[len(found) :]
        below = [await tier.contains(rest) for tier in self.lower]
        for position, key in enumerate(rest):
            if self.shm.store.contains(key):
                found.append(self.shm.name)
                continue
            name = next((t.name for t, present in zip(self.lower, below, strict=True) if present[position]), None)
            if name is None:
                break
            found.append(name)
        return found

    async def acquire(
        self, session: Session, keys: Sequence[BlockKey], *, max_wait_s: float, prefix_only: bool
    ) -> AsyncIterator[list[Acquired]]:
        """Read leases in the order of the keys, as soon as each batch is in shared memory.

        Args:
            session: who reads.
            keys: of the blocks.
            max_wait_s: blocks that are not in shared memory by then are misses.
            prefix_only: end at the first miss, which is part of the answer.
        """
        deadline = self._clock.now() + max_wait_s
        if self._touched_down:
            await self.touch([key for key in keys if self.shm.store.contains(key)])
        ready: list[Acquired] = []
        for index, key in enumerate(keys):
            lease, tier = self.shm.store.acquire(session, key), self.shm.name
            if lease is None and self.lower:
                if ready:
                    yield ready
                    ready = []
                filled_from = await self._fill(key, session.layout, deadline - self._clock.now())
                block = self.shm.store.committed_block(key)
                if block is not None:
                    lease, tier = self.shm.store.hold(session, block), filled_from or self.shm.name
            ready.append(Acquired(index, lease, tier if lease is not None else ""))
            if lease is None and prefix_only:
                break
        if ready:
            yield ready

    async def measure(self, blocks: list[Block]) -> list[bytes]:
        """Checksums of the blocks' bytes; other calls go on meanwhile."""
        if sum(block.layout.block_bytes for block in blocks) <= _INLINE_HASH_BYTES:
            return self.shm.measure(blocks)
        return await asyncio.to_thread(self.shm.measure, blocks)

    async def checksum(self, data: memoryview) -> bytes:
        """Checksum of bytes that are in no block; other calls go on meanwhile."""
        return checksum(data) if data.nbytes <= _INLINE_HASH_BYTES else await asyncio.to_thread(checksum, data)

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
        tasks = list(self._filling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for behind in self._down:
            await behind.close()

    async def _fill(self, key: BlockKey, layout: Layout, wait_s: float) -> str | None:
        """Brings a block up; callers that want the same block share the work, which goes on when they stop waiting."""
        task = self._filling.get(key)
        if task is None:
            task = asyncio.create_task(self._fill_now(key, layout))
            self._filling[key] = task
            task.add_done_callback(lambda _: self._filling.pop(key, None))
        done, _ = await asyncio.wait([task], timeout=max(0.0, wait_s))
        return task.result() if done else None

    async def _fill_now(self, key: BlockKey, layout: Layout) -> str | None:
        store = self.shm.store
        lease = store.reserve(self._own, key, layout)
        if isinstance(lease, Refusal):
            return None
        block = lease.block
        try:
            for tier in self.lower:
                stored = await tier.get(key, self.shm.view(block))
                if stored is None:
                    continue
                (measured,) = await self.measure([block])
                # What the tier says of itself counts only if it is the block that was asked for.
                claimed = stored.checksum if stored == StoredBlock(key, layout, stored.checksum) else b""
                if store.commit(self._own, lease.lease_id, generation=block.place.generation, claimed=claimed, measured=measured):
                    await self.touch([key])
                    return tier.name
                log.error("block %s is corrupt in tier %s; dropped", key.hex(), tier.name)
                await tier.evict(key)
                return None
            return None
        finally:
            store.abort(self._own, [lease.lease_id])
