"""A lower tier in a dictionary, that can be told to fail."""

import asyncio
from collections.abc import Sequence

from common.ids import BlockKey
from common.shm.checksum import checksum
from kvstore_svc.tiers.base import FoundBlock, StoredBlock, TierCounts


class MemoryTier:
    """See LowerTier.

    Attributes:
        gate: get waits for it; set by default.
        asked: set by the first get.
    """

    def __init__(self, name: str = "disk"):
        self.name = name
        self.blocks: dict[BlockKey, tuple[StoredBlock, bytearray]] = {}
        self.num_gets = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self.blocks for key in keys]

    async def get(self, key: BlockKey, into: memoryview) -> FoundBlock | None:
        self.num_gets += 1
        self.asked.set()
        await self.gate.wait()
        if key not in self.blocks:
            return None
        stored, data = self.blocks[key]
        if len(data) != len(into):
            return None
        into[:] = data
        return FoundBlock(stored, checksum(into))

    async def put(self, block: StoredBlock, data: memoryview) -> bool:
        self.blocks.setdefault(block.key, (block, bytearray(data)))
        return True

    async def evict(self, key: BlockKey) -> bool:
        return self.blocks.pop(key, None) is not None

    async def clear(self, fingerprint: bytes | None) -> int:
        chosen = [k for k, (block, _) in self.blocks.items() if fingerprint in (None, block.layout.fingerprint)]
        for key in chosen:
            del self.blocks[key]
        return len(chosen)

    def counts(self) -> TierCounts:
        used_bytes = sum(len(data) for _, data in self.blocks.values())
        return TierCounts(1 << 40, used_bytes, len(self.blocks), 0, 0, 0, 0)
