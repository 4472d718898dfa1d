"""The disk tier on a real file system: what it promises, and what it makes of a disk that does not."""

import asyncio
import errno
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.clock import ManualClock
from common.degraded import DegradedPaths
from common.errors import StartupError
from common.ids import BlockKey
from common.shm.checksum import checksum
from kvstore_svc.core.block import Layout
from kvstore_svc.core.disk_record import HEADER_BYTES, RECORD_BYTES
from kvstore_svc.tiers.base import StoredBlock
from kvstore_svc.tiers.disk import DiskTier, open_disk_tier
from kvstore_svc.tiers.disk_device import MAX_FAILURES, PAUSE_S
from kvstore_svc.tiers.disk_folder import DiskUnavailable, default_capacity
from kvstore_svc.tiers.disk_segment import SegmentFile, find_segments

KIB = 1024
MIB = KIB * KIB
BLOCK_BYTES = 60 * KIB
LAYOUT = Layout(b"f" * 32, BLOCK_BYTES)
ODD = Layout(b"o" * 32, 5000)


def open_tier(
    folder: Path, *, capacity_bytes: int = MIB, clock: ManualClock | None = None, degraded: DegradedPaths | None = None
) -> DiskTier:
    return open_disk_tier(
        folder,
        "here",
        capacity_bytes=capacity_bytes,
        segment_bytes=256 * KIB,
        clock=clock or ManualClock(),
        degraded=degraded or DegradedPaths(),
    )


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def data_of(number: int, layout: Layout = LAYOUT) -> memoryview:
    return memoryview(bytearray(number.to_bytes(4, "big") * (layout.block_bytes // 4)))


async def put(tier: DiskTier, *numbers: int, layout: Layout = LAYOUT) -> list[bool]:
    done = []
    for number in numbers:
        data = data_of(number, layout)
        done.append(await tier.put(StoredBlock(key(number), layout, checksum(data)), data))
    return done


async def have(tier: DiskTier, *numbers: int, layout: Layout = LAYOUT) -> list[int]:
    """Numbers of the blocks that come back; nothing wrong may pass for right."""
    found = []
    for number in numbers:
        into = memoryview(bytearray(layout.block_bytes))
        block = await tier.get(key(number), into)
        if block is not None and block.is_intact:
            stored = block.stored
            assert stored.checksum == checksum(into)
            assert (stored.key, stored.layout, into) == (key(number), layout, data_of(number, layout))
            found.append(number)
    return found


def slot_of(folder: Path, number: int) -> tuple[Path, int]:
    """Where the only copy of a block's bytes begins."""
    wanted = bytes(data_of(number))
    (found,) = [(p, at) for p, _, _ in find_segments(folder) if (at := p.read_bytes().find(wanted)) >= 0]
    return found


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (value,) = file.read(1)
        file.seek(offset)
        file.write(bytes([value ^ 1]))


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


@pytest.mark.parametrize(
    ("free_bytes", "own_bytes", "capacity_bytes"),
    [
        (200 << 30, 0, 64 << 30),
        (10 << 30, 0, 5 << 30),
        (10 << 30, 2 << 30, 6 << 30),
        (1 << 30, 8 << 30, 8 << 30),
        (0, 5, 5),
        (0, 0, 0),
    ],
)
def test_a_default_capacity_is_half_of_the_room_and_never_less_than_what_is_there(
    free_bytes: int, own_bytes: int, capacity_bytes: int
) -> None:
    assert default_capacity(free_bytes, own_bytes) == capacity_bytes


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


async def test_a_second_store_on_the_folder_is_refused(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)

    with pytest.raises(StartupError, match=r"another block store uses it \(here\)"):
        open_tier(tmp_path)

    await tier.close()
    await open_tier(tmp_path).close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("octavo block store, disk format 2\n", "written by a newer version .disk format 2, this one knows 1"),
        ("a diary", "it is no folder of a block store"),
    ],
)
async def test_a_folder_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "format").write_text(text)

    with pytest.raises(StartupError, match=message):
        open_tier(tmp_path)

    assert (tmp_path / "format").read_text() == text


async def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(DiskUnavailable, match="file/kv: Not a directory"):
        open_tier(tmp_path / "file" / "kv")


async def test_files_that_are_no_segments_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "segment-x.kv").write_text("mine")
    (tmp_path / "segment-00000001-100.kv").write_text("mine")
    tier = open_tier(tmp_path)
    await tier.clear(None)
    await tier.close()

    assert (tmp_path / "segment-x.kv").read_text() == (tmp_path / "segment-00000001-100.kv").read_text() == "mine"


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


class FailingSegment(SegmentFile):
    """A disk with errors, while error is set."""

    error: int | None = None

    def write(self, slot: int, header: bytes, data: memoryview) -> None:
        self.fail()
        super().write(slot, header, data)

    def read(self, slot: int, into: memoryview) -> bytes:
        self.fail()
        return super().read(slot, into)

    def fail(self) -> None:
        if type(self).error is not None:
            raise OSError(type(self).error, os.strerror(type(self).error or 0))


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[tuple[DiskTier, ManualClock, DegradedPaths]]:
    """A tier whose segments can be told to fail."""
    clock, degraded = ManualClock(), DegradedPaths()
    tier = open_tier(tmp_path, clock=clock, degraded=degraded)
    tier.segment_type = FailingSegment
    FailingSegment.error = None
    yield tier, clock, degraded
    FailingSegment.error = None


async def test_a_disk_that_fails_is_left_alone_and_tried_again(failing: tuple[DiskTier, ManualClock, DegradedPaths]) -> None:
    tier, clock, degraded = failing
    assert await put(tier, 1) == [True]
    FailingSegment.error = errno.EIO
    for number in range(2, 2 + MAX_FAILURES):
        assert await put(tier, number) == [False]
    assert "Input/output error" in tier.counts().unavailable_reason
    assert degraded.counts["kvstore_disk"] == MAX_FAILURES
    FailingSegment.error = None
    assert await put(tier, 20) == [False]
    assert await have(tier, 1) == []
    assert await tier.contains([key(1)]) == [False]

    clock.advance(PAUSE_S)

    assert tier.counts().unavailable_reason == ""
    assert await put(tier, 20) == [True]
    assert await have(tier, 1, 20) == [1, 20]
    tier.check_integrity()
    await tier.close()


async def test_a_block_that_cannot_be_read_is_dropped(failing: tuple[DiskTier, ManualClock, DegradedPaths]) -> None:
    tier, _, degraded = failing
    await put(tier, 1, 2)
    FailingSegment.error = errno.EIO
    assert await have(tier, 1) == []
    FailingSegment.error = None

    assert await have(tier, 1, 2) == [2]
    assert degraded.counts["kvstore_disk"] == 1
    tier.check_integrity()
    await tier.close()


async def test_a_full_disk_goes_on_with_what_it_has(tmp_path: Path) -> None:
    clock, degraded = ManualClock(), DegradedPaths()
    tier = open_tier(tmp_path, clock=clock, degraded=degraded)
    await put(tier, 1, 2)
    (num_files, is_full) = (len(find_segments(tmp_path)), True)

    class FullDisk(SegmentFile):
        @classmethod
        def create(cls, folder: Path, segment_id: int, slot_bytes: int, num_slots: int) -> SegmentFile:
            if is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().create(folder, segment_id, slot_bytes, num_slots)

    tier.segment_type = FullDisk
    assert await put(tier, *range(3, 9)) == [True] * 6
    assert (len(find_segments(tmp_path)), degraded.counts["kvstore_disk_full"]) == (num_files, 1)
    assert await have(tier, 8) == [8]
    is_full = False
    clock.advance(PAUSE_S)

    assert await put(tier, *range(9, 20)) == [True] * 11
    assert len(find_segments(tmp_path)) > num_files
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


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


class UnsyncedSegment(SegmentFile):
    """A disk that fails to sync, while error is set."""

    error: int | None = None

    def sync(self) -> None:
        if type(self).error is not None:
            raise OSError(type(self).error, os.strerror(type(self).error or 0))
        super().sync()


async def test_blocks_of_a_failed_sync_are_never_called_durable(tmp_path: Path) -> None:
    """Though a later one succeeds: the kernel reports a lost write once."""
    tier = open_tier(tmp_path)
    tier.segment_type = UnsyncedSegment
    UnsyncedSegment.error = errno.EIO
    await put(tier, 1)
    assert not await tier.flush()
    UnsyncedSegment.error = None
    await put(tier, 2)

    assert await tier.flush()

    assert (tier.is_durable(key(1)), tier.is_durable(key(2))) == (False, True)
    assert await have(tier, 1, 2) == [1, 2]
    await tier.close()


async def test_an_index_that_cannot_be_written_is_written_anew_later(tmp_path: Path) -> None:
    degraded = DegradedPaths()
    tier = open_tier(tmp_path, capacity_bytes=8 * MIB, degraded=degraded)
    small = Layout(b"s" * 32, 4096)
    await put(tier, 0)
    await put(tier, *range(100, 600), layout=small)  # makes the index longer than the first slot of a segment
    await tier.evict(key(0))
    assert await tier.flush()
    assert (tmp_path / "index").stat().st_size > 72 * KIB
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (72 * KIB, hard))
    try:
        assert await put(tier, 1) == [True]  # in the place of the first one
        assert not await tier.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert degraded.counts["kvstore_disk"] == 1
    assert not tier.is_durable(key(1))
    await put(tier, 3)

    assert await tier.flush()

    assert [tier.is_durable(key(n)) for n in (1, 3)] == [True, True]
    await tier.close()
    tier = open_tier(tmp_path, capacity_bytes=8 * MIB)
    assert tier.num_scanned_segments == 0
    assert await have(tier, 1, 3) == [1, 3]
    await tier.close()
