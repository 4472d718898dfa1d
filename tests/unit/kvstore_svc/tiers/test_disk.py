"""The disk tier on a real file system: what goes in comes out, and what is damaged does not."""

import asyncio
import shutil
from pathlib import Path

import pytest

from kvstore_svc.core.block import Layout
from kvstore_svc.core.disk_record import HEADER_BYTES
from kvstore_svc.tiers.disk_segment import find_segments
from tests.unit.kvstore_svc.tiers.disk_rig import BLOCK_BYTES, LAYOUT, MIB, ODD, flip, have, key, open_tier, put, slot_of


@pytest.mark.parametrize("layout", [LAYOUT, ODD])
async def test_what_was_put_comes_back_now_and_after_a_restart(tmp_path: Path, layout: Layout) -> None:
    tier = open_tier(tmp_path)
    assert await put(tier, 1, 2, 3, layout=layout) == [True] * 3
    assert await have(tier, 1, 2, 3, 4, layout=layout) == [1, 2, 3]
    await tier.close()

    tier = open_tier(tmp_path)

    assert tier.num_scanned_segments == 0
    assert await tier.contains([key(1), key(4)]) == [True, False]
    assert await have(tier, 1, 2, 3, 4, layout=layout) == [1, 2, 3]
    counts = tier.counts()
    assert (counts.num_blocks, counts.num_hits, counts.num_misses) == (3, 3, 1)
    tier.check_integrity()
    await tier.close()


async def test_several_layouts_share_the_folder(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    await put(tier, 1, 2)
    await put(tier, 3, layout=ODD)
    assert tier.layouts() == {LAYOUT: 2, ODD: 1}

    assert await tier.clear(ODD.fingerprint) == 1

    assert await have(tier, 3, layout=ODD) == []
    assert await have(tier, 1, 2) == [1, 2]
    assert await tier.clear(None) == 2
    assert find_segments(tmp_path) == []
    tier.check_integrity()
    await tier.close()


async def test_a_block_of_another_size_is_a_miss(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    await put(tier, 1)

    assert await tier.get(key(1), memoryview(bytearray(BLOCK_BYTES - 4096))) is None
    assert await have(tier, 1) == [1]
    await tier.close()


async def test_a_block_is_durable_when_a_flush_has_ended(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    await put(tier, 1)
    assert not tier.is_durable(key(1))

    assert await tier.flush()

    assert tier.is_durable(key(1))
    shutil.copytree(tmp_path, tmp_path.with_name("crashed"))
    await put(tier, 2)
    await tier.close()
    tier = open_tier(tmp_path.with_name("crashed"))
    assert tier.is_durable(key(1))
    assert await have(tier, 1, 2) == [1]
    await tier.close()


async def test_puts_are_flushed_by_themselves(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    await put(tier, 1)

    async with asyncio.timeout(20):
        while not tier.is_durable(key(1)):
            await asyncio.sleep(0.01)
    await tier.close()


async def test_more_than_fits_evicts_and_stays_within_the_capacity(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    await put(tier, *range(50))

    found = await have(tier, *range(50))

    assert found[-1] == 49
    assert len(found) == tier.counts().num_blocks >= 8
    assert sum(path.stat().st_size for path, _, _ in find_segments(tmp_path)) <= MIB
    await tier.close()
    smaller = open_tier(tmp_path, capacity_bytes=MIB // 2)
    assert sum(path.stat().st_size for path, _, _ in find_segments(tmp_path)) <= MIB // 2
    assert await have(smaller, *range(50))
    smaller.check_integrity()
    await smaller.close()


@pytest.mark.parametrize("is_in_header", [True, False])
async def test_a_flipped_bit_is_a_miss_and_costs_one_block(tmp_path: Path, is_in_header: bool) -> None:
    tier = open_tier(tmp_path)
    await put(tier, 1, 2)
    path, at = slot_of(tmp_path, 1)

    flip(path, at - HEADER_BYTES + 40 if is_in_header else at + 1234)

    assert await have(tier, 1, 2) == [2]
    if is_in_header:
        assert tier.counts().num_bad == 1
        assert await tier.contains([key(1)]) == [False]
    else:
        assert await tier.evict(key(1))  # as the stack does, which compares checksums
        assert tier.counts().num_bad == 1
    assert await put(tier, 1) == [True]
    assert await have(tier, 1, 2) == [1, 2]
    tier.check_integrity()
    await tier.close()


async def test_a_get_that_is_cancelled_writes_nowhere_afterwards(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    await put(tier, 1)
    into = memoryview(bytearray(BLOCK_BYTES))
    reading = asyncio.create_task(tier.get(key(1), into))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    into[:] = bytes(BLOCK_BYTES)

    await put(tier, 2)
    await tier.close()

    assert bytes(into) == bytes(BLOCK_BYTES)
