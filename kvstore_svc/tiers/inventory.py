"""Looking after what is stored: listed, made durable, verified, read without a client's session.

Knows tiers and blocks. Does not know gRPC, nor files of its own. What it reads from disk goes into a buffer of its own, so that
a look at everything does not push out of shared memory what is in use.
"""

import mmap
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from math import inf

from common.ids import BlockKey, SessionId
from kvstore_svc.core.block import Layout
from kvstore_svc.core.disk_record import slot_bytes
from kvstore_svc.tiers.base import StoredBlock
from kvstore_svc.tiers.disk import DiskTier
from kvstore_svc.tiers.stack import TierStack

# Of the store itself, as OWN_SESSION.
INVENTORY_SESSION = SessionId("inventory")


@dataclass
class Verification:
    """How far a verification is."""

    num_blocks: int
    num_checked: int = 0
    num_checked_bytes: int = 0
    num_bad: int = 0


class Inventory:
    """See the module's first lines.

    Args:
        tiers: all tiers.
        disk: the disk tier among them; None: there is none.
    """

    def __init__(self, tiers: TierStack, disk: DiskTier | None):
        self._tiers = tiers
        self._shm = tiers.shm
        self._disk = disk
        self._own = tiers.shm.store.open_session(INVENTORY_SESSION, "inventory", Layout(b"", 0), inf)

    def layouts(self) -> dict[str, dict[Layout, int]]:
        """How many blocks of each layout there are, by tier."""
        found = {self._shm.name: dict(Counter(block.layout for block in self._shm.store.blocks()))}
        if self._disk is not None:
            found[self._disk.name] = self._disk.layouts()
        return found

    async def persist(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Writes blocks of shared memory to disk and waits until they are durable; False: not on disk, or not surely."""
        if self._disk is None:
            return [False] * len(keys)
        await self._tiers.write_down(keys, self._disk.name)
        await self._disk.flush()
        return [self._disk.is_durable(key) for key in keys]

    async def verify(self, fingerprint: bytes | None) -> AsyncIterator[Verification]:
        """Reads all blocks of the disk, of a layout or of all, and drops those that are wrong; yields after each one."""
        blocks = self._disk.blocks(fingerprint) if self._disk is not None else []
        progress = Verification(len(blocks))
        for stored in blocks:
            if self._disk is not None and await self._disk.contains([stored.key]) == [True]:
                is_good = await self._from_disk(stored) is not None
                progress.num_bad += not is_good
            progress.num_checked += 1
            progress.num_checked_bytes += stored.layout.block_bytes
            yield progress
        if not blocks:
            yield progress

    def chosen(self, keys: Sequence[BlockKey], fingerprint: bytes | None) -> list[StoredBlock]:
        """Blocks of shared memory and of the disk; keys: only these, in this order."""
        found = {block.key: self._shm.stored(block) for block in self._shm.store.blocks()}
        if self._disk is not None:
            found = {stored.key: stored for stored in self._disk.blocks(None)} | found
        selected = [found[key] for key in keys if key in found] if keys else list(found.values())
        return [stored for stored in selected if fingerprint in (None, stored.layout.fingerprint)]

    async def read(self, stored: StoredBlock) -> memoryview | None:
        """A verified copy of a block's bytes; None: it is gone, or was wrong and was dropped."""
        block = self._shm.store.committed_block(stored.key)
        if block is None:
            return await self._from_disk(stored)
        lease = self._shm.store.hold(self._own, block)
        try:
            if not await self._tiers.is_intact(block):
                return None
            return memoryview(bytes(self._shm.view(block)))
        finally:
            self._shm.store.release(self._own, [lease.lease_id])

    async def _from_disk(self, stored: StoredBlock) -> memoryview | None:
        if self._disk is None:
            return None
        # Aligned, and as long as a slot: the disk tier reads straight into it.
        into = memoryview(mmap.mmap(-1, slot_bytes(stored.layout.block_bytes)))[: stored.layout.block_bytes]
        found = await self._disk.get(stored.key, into)
        if found is None:
            return None
        if found.stored == stored and found.is_intact:
            return into
        await self._disk.evict(stored.key)
        return None
