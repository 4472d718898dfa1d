"""A disk tier in a folder, and the blocks of its tests."""

from pathlib import Path

from common.clock import ManualClock
from common.degraded import DegradedPaths
from common.ids import BlockKey
from common.shm.checksum import checksum
from kvstore_svc.core.block import Layout
from kvstore_svc.tiers.base import StoredBlock
from kvstore_svc.tiers.disk import DiskTier, open_disk_tier
from kvstore_svc.tiers.disk_segment import find_segments

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
