"""The disk tier on a disk that fails to read, to write, to grow and to sync."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.clock import ManualClock
from common.degraded import DegradedPaths
from kvstore_svc.core.block import Layout
from kvstore_svc.tiers.disk import DiskTier
from kvstore_svc.tiers.disk_device import MAX_FAILURES, PAUSE_S
from kvstore_svc.tiers.disk_segment import SegmentFile, find_segments
from tests.unit.kvstore_svc.tiers.disk_rig import KIB, MIB, have, key, open_tier, put


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
