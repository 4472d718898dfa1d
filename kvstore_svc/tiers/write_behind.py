"""Blocks on their way down to one lower tier: a queue that is bounded in blocks and in bytes.

Knows leases and one tier. Does not know which blocks are worth it, nor other tiers: a slow one holds up nobody but itself.

A block in the queue is held in shared memory, so the bound in bytes is also the share of shared memory that a slow tier can
keep from being used for anything else.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from common.degraded import DegradedPaths
from common.ids import BlockKey
from kvstore_svc.core.session import Lease, Session
from kvstore_svc.tiers.base import LowerTier
from kvstore_svc.tiers.shm import ShmTier

MAX_BLOCKS = 4096
# Of shared memory.
_SHARE = 4
_NUM_WRITERS = 2


class WriteBehind:
    """See the module's first lines.

    Args:
        shm: where the blocks come from.
        tier: where they go.
        own: session that holds them meanwhile.
        degraded: counts what was not written down.
        max_blocks: bound of the queue.
    """

    def __init__(self, shm: ShmTier, tier: LowerTier, own: Session, degraded: DegradedPaths, max_blocks: int = MAX_BLOCKS):
        self.tier = tier
        self._shm = shm
        self._own = own
        self._degraded = degraded
        self._max_blocks = max_blocks
        self._max_bytes = max(1, shm.places.capacity_bytes // _SHARE)
        self._queue: deque[Lease] = deque()
        self._held: dict[BlockKey, Lease] = {}
        self._num_bytes = 0
        self._writers: set[asyncio.Task[None]] = set()

    @property
    def num_blocks(self) -> int:
        """Blocks that wait or are being written."""
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        """Their bytes."""
        return self._num_bytes

    @property
    def is_half_full(self) -> bool:
        """A good time for those who can wait to wait."""
        return 2 * len(self._held) >= self._max_blocks or 2 * self._num_bytes >= self._max_bytes

    def offer(self, keys: Sequence[BlockKey]) -> None:
        """Takes committed blocks of a chain; those behind the bound are counted and not written.

        They are written last block first: tiers evict old blocks before young ones, and a chain without its end is worth more
        than one without its beginning.
        """
        taken = []
        for key in keys:
            block = self._shm.store.committed_block(key)
            if block is None or key in self._held:
                continue
            if self._held and (
                len(self._held) >= self._max_blocks or self._num_bytes + block.layout.block_bytes > self._max_bytes
            ):
                waiting = f"{len(self._held)} blocks of {self._num_bytes} bytes"
                self._degraded.note("kvstore_write_down", f"{waiting} wait for tier {self.tier.name} already")
                break
            lease = self._shm.store.hold(self._own, block)
            self._held[key] = lease
            self._num_bytes += block.layout.block_bytes
            taken.append(lease)
        self._queue.extend(reversed(taken))
        while len(self._writers) < min(_NUM_WRITERS, len(self._queue)):
            writer = asyncio.create_task(self._write())
            self._writers.add(writer)
            writer.add_done_callback(self._writers.discard)

    async def settle(self) -> None:
        """Waits until nothing is on its way."""
        while self._writers:
            await asyncio.gather(*self._writers)

    def forget(self) -> None:
        """Lets go of what waits; what is being written goes on."""
        while self._queue:
            self._release(self._queue.popleft())

    async def close(self) -> None:
        """Ends the background work, whatever waits."""
        self.forget()
        for writer in self._writers:
            writer.cancel()
        await asyncio.gather(*self._writers, return_exceptions=True)

    async def _write(self) -> None:
        while self._queue:
            lease = self._queue.popleft()
            block = lease.block
            try:
                if await self.tier.put(self._shm.stored(block), self._shm.view(block)):
                    self._degraded.clear("kvstore_write_down")
                else:
                    self._degraded.note("kvstore_write_down", f"tier {self.tier.name} did not take a block")
            finally:
                self._release(lease)

    def _release(self, lease: Lease) -> None:
        del self._held[lease.block.key]
        self._num_bytes -= lease.block.layout.block_bytes
        self._shm.store.release(self._own, [lease.lease_id])
