"""A Redis tier in this process, for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from common.clock import MonotonicClock
from common.degraded import DegradedPaths
from common.shm.checksum import checksum
from kvstore_svc.core.block import Layout
from kvstore_svc.tiers.base import StoredBlock
from kvstore_svc.tiers.redis_tier import RedisConfig, RedisTier
from tests.integration.kvstore_svc.store_process import FINGERPRINT, key

BLOCK_BYTES = 200_000
LAYOUT = Layout(FINGERPRINT, BLOCK_BYTES)


@dataclass(frozen=True)
class Rig:
    """The tier and where it says what went wrong."""

    tier: RedisTier
    degraded: DegradedPaths

    @property
    def reason(self) -> str:
        """Why the server is left alone; empty: it is not."""
        return self.tier.counts().unavailable_reason

    async def put(self, *numbers: int, layout: Layout = LAYOUT) -> list[bool]:
        """Puts blocks; whether each was taken."""
        found = []
        for number in numbers:
            data = data_of(number, layout.block_bytes)
            found.append(await self.tier.put(StoredBlock(key(number), layout, checksum(data)), memoryview(data)))
        return found

    async def get(self, number: int, num_bytes: int = BLOCK_BYTES) -> bytes | None:
        """A block's bytes; None: a miss."""
        into = bytearray(num_bytes)
        found = await self.tier.get(key(number), memoryview(into))
        if found is None:
            return None
        stored = found.stored
        assert found.measured == checksum(memoryview(into))
        assert (stored.key, stored.layout.block_bytes, stored.checksum) == (key(number), num_bytes, checksum(memoryview(into)))
        return bytes(into)


@asynccontextmanager
async def tier_of(
    url: str, *, timeout_s: float = 10.0, off_s: float = 0.1, num_connections: int = 4, ttl_s: int = 1000
) -> AsyncIterator[Rig]:
    """A tier of a server; by default it waits long, because the machine may be busy, and comes back soon."""
    degraded = DegradedPaths()
    config = RedisConfig(url, num_connections, ttl_s, timeout_s, lookup_timeout_s=timeout_s, off_s=off_s)
    tier = RedisTier(config, clock=MonotonicClock(), degraded=degraded)
    try:
        yield Rig(tier, degraded)
    finally:
        await tier.close()


def data_of(number: int, num_bytes: int = BLOCK_BYTES) -> bytes:
    """Bytes of a block of tests."""
    return (b"%08d" % number) * (num_bytes // 8) + b"x" * (num_bytes % 8)
