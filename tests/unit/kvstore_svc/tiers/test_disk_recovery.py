"""What the disk tier finds when it opens a folder again: after a stop, a crash, and without its index."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.shm.checksum import checksum
from kvstore_svc.core.block import Layout
from kvstore_svc.core.disk_record import HEADER_BYTES, RECORD_BYTES
from kvstore_svc.tiers.base import StoredBlock
from kvstore_svc.tiers.disk_folder import DiskUnavailable
from kvstore_svc.tiers.disk_segment import find_segments
from tests.unit.kvstore_svc.tiers.disk_rig import BLOCK_BYTES, LAYOUT, data_of, flip, have, key, open_tier, put, slot_of


@pytest.mark.parametrize("is_of_this_life", [True, False])
async def test_a_header_of_zeros_is_a_bad_block_unless_a_crash_may_have_left_it(tmp_path: Path, is_of_this_life: bool) -> None:
    """A block that was dropped, and a crash before the index was told, look the same at the next start."""
    tier = open_tier(tmp_path)
    await put(tier, 1)
    await tier.flush()
    path, at = slot_of(tmp_path, 1)
    if not is_of_this_life:
        await tier.close()
        tier = open_tier(tmp_path)
    with path.open("r+b") as file:
        file.seek(at - HEADER_BYTES)
        file.write(bytes(HEADER_BYTES))

    assert await have(tier, 1) == []
    assert tier.counts().num_bad == is_of_this_life
    await tier.close()


async def test_a_slot_that_another_block_took_never_serves_the_old_key(tmp_path: Path) -> None:
    """The index of before, over segments of after."""
    tier = open_tier(tmp_path)
    await put(tier, *range(6))
    await tier.flush()
    index = (tmp_path / "index").read_bytes()
    await put(tier, *range(6, 40))
    await tier.close()
    (tmp_path / "index").write_bytes(index)

    tier = open_tier(tmp_path)

    assert set(await have(tier, *range(6))) <= set(range(6))  # have compares the bytes
    tier.check_integrity()
    await tier.close()


@pytest.mark.parametrize("damage", ["missing", "torn", "garbage", "bit in the middle", "no rights to it"])
async def test_without_a_good_index_the_headers_of_slots_tell_all(tmp_path: Path, damage: str) -> None:
    tier = open_tier(tmp_path)
    await put(tier, *range(5))
    await tier.close()
    index = tmp_path / "index"
    match damage:
        case "missing":
            index.unlink()
        case "torn":
            index.write_bytes(b"")
        case "garbage":
            index.write_bytes(os.urandom(5 * RECORD_BYTES))
        case "bit in the middle":
            flip(index, 2 * RECORD_BYTES + 50)
        case _:
            index.unlink()
            index.mkdir()  # cannot be read, by root neither
            with pytest.raises(DiskUnavailable):
                open_tier(tmp_path)
            index.rmdir()

    tier = open_tier(tmp_path)

    assert tier.num_scanned_segments > 0
    assert await have(tier, *range(5)) == list(range(5))
    await tier.close()
    tier = open_tier(tmp_path)
    assert tier.num_scanned_segments == 0
    await tier.close()


async def test_dropped_blocks_stay_dropped_even_without_an_index(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    await put(tier, *range(20))  # some of them lie in slots that are free again
    await tier.put(StoredBlock(key(99), Layout(b"g" * 32, BLOCK_BYTES), checksum(data_of(99))), data_of(99))

    await tier.clear(LAYOUT.fingerprint)

    await tier.close()
    (tmp_path / "index").unlink()
    tier = open_tier(tmp_path)
    assert tier.counts().num_blocks == 1
    assert await have(tier, *range(20)) == []
    await tier.close()


async def test_a_segment_that_was_cut_off_has_fewer_slots(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    await put(tier, 1, 2)
    await tier.close()
    (path, _, size), *_ = find_segments(tmp_path)
    os.truncate(path, size)

    tier = open_tier(tmp_path)

    assert len(await have(tier, 1, 2)) == 1
    tier.check_integrity()
    await tier.close()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from("ppppfgdc"), st.integers(0, 24)), max_size=40), st.data())
def test_after_a_crash_what_was_durable_is_there_and_nothing_is_wrong(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, int]], data: st.DataObject
) -> None:
    """Against a model: a set of keys that are durable. The index may lose any part that was written after the last flush."""
    folder = tmp_path_factory.mktemp("disk")

    async def live() -> tuple[set[int], int]:
        tier = open_tier(folder)
        durable: set[int] = set()
        num_index_bytes = 0
        for call, number in calls:
            match call:
                case "p":
                    await put(tier, number)
                case "f":
                    await tier.flush()
                    durable = {n for n in range(25) if tier.is_durable(key(n))}
                    num_index_bytes = (folder / "index").stat().st_size
                case "g":
                    await have(tier, number)
                case "d":
                    await tier.evict(key(number))
                case "c":
                    await tier.clear(None)
            durable = {n for n in durable if tier.is_durable(key(n))}
            tier.check_integrity()
        # A crash: nothing is closed in good order.
        crashed = folder.with_name(folder.name + "-crashed")
        shutil.copytree(folder, crashed)
        await tier.close()
        return durable, num_index_bytes

    durable, num_index_bytes = asyncio.run(live())
    crashed = folder.with_name(folder.name + "-crashed")
    index = (crashed / "index").read_bytes()
    cut = data.draw(st.integers(num_index_bytes, max(num_index_bytes, len(index))))
    (crashed / "index").write_bytes(index[:cut] + data.draw(st.binary(max_size=200)))

    async def live_again() -> set[int]:
        tier = open_tier(crashed)
        found = set(await have(tier, *range(25)))
        assert tier.counts().num_bad == 0 or cut < len(index)
        tier.check_integrity()
        await tier.close()
        return found

    assert durable <= asyncio.run(live_again())
    shutil.rmtree(folder)
    shutil.rmtree(crashed)
