import asyncio
import time

import pytest

from common.clock import MonotonicClock
from common.ids import BlockKey
from common.shm.checksum import checksum
from kvstore_svc.core.block import Layout
from kvstore_svc.tiers.base import FoundBlock, StoredBlock
from kvstore_svc.tiers.throttled import Throttle, ThrottledTier, throttled
from tests.unit.kvstore_svc.tiers.memory_tier import MemoryTier

KEY = BlockKey(b"k" * 32)


def test_what_is_slowed_down_is_written_as_tier_bandwidth_and_latency() -> None:
    assert Throttle.parse("disk=1e9") == Throttle("disk", 1e9, 0.0)
    assert Throttle.parse("redis=5e8:0.002") == Throttle("redis", 5e8, 0.002)
    for text in ("disk", "disk=", "=1", "disk=fast", "disk=0", "disk=1:-1", "disk=1:x"):
        with pytest.raises(ValueError, match="expected tier=bytes_per_s"):
            Throttle.parse(text)


def test_only_the_tiers_that_are_named_are_slower() -> None:
    disk, redis = MemoryTier("disk"), MemoryTier("redis")

    slower, same = throttled([disk, redis], [Throttle("disk", 1.0)], MonotonicClock())

    assert isinstance(slower, ThrottledTier) and same is redis
    assert slower.name == "disk"


async def test_reads_share_the_bandwidth_and_bring_the_same_bytes() -> None:
    tier = MemoryTier()
    data = bytes(range(100))
    stored = StoredBlock(KEY, Layout(b"f" * 32, 100), checksum(data))
    tier.blocks[KEY] = (stored, bytearray(data))
    slower = ThrottledTier(tier, Throttle("disk", bytes_per_s=10_000.0, latency_s=0.005), MonotonicClock())
    buffers = [bytearray(100) for _ in range(3)]

    started_s = time.monotonic()
    found = await asyncio.gather(*(slower.get(KEY, memoryview(buffer)) for buffer in buffers))

    assert time.monotonic() - started_s >= 0.035  # never faster; a busy machine may be slower
    assert found == [FoundBlock(stored, checksum(data))] * 3 and buffers == [bytearray(data)] * 3
