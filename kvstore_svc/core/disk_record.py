"""What the disk tier writes beside a block's bytes, as bytes: the header of a slot, and the records of the index.

Knows formats and checksums. Does not know files, which slots exist or what is worth keeping.

Both say the same of a block: its key, layout and checksum, where it lies, and a sequence number that grows with every write.
A slot's header lies in front of the block's bytes and is what counts: what the index says is believed only as far as to read
there. Every record carries its own checksum, so half a record is no record.
"""

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from common.ids import BlockKey
from kvstore_svc.core.block import Layout

DISK_FORMAT = 1
SLOT_ALIGNMENT_BYTES = 4096
HEADER_BYTES = 4096
RECORD_BYTES = 160
_SUM_BYTES = 16
_MAGIC = b"OCTSLOT1"
# magic, format, kind, segment, slot, sequence, length, key, fingerprint, checksum
_FIELDS = struct.Struct("<8sHHIIQQ32s32s16s")
_PADDED = RECORD_BYTES - _SUM_BYTES


class RecordKind(enum.IntEnum):
    """What a record says."""

    BLOCK = 1  # the slot holds this block
    DROPPED = 2  # it does not any more, though its bytes may still be there


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """One block in one slot.

    Attributes:
        checksum: xxh3-128 of the block's bytes.
        sequence: of two records of one key or of one slot, the one with the larger number is right.
    """

    kind: RecordKind
    key: BlockKey
    layout: Layout
    checksum: bytes
    segment_id: int
    slot: int
    sequence: int

    def pack(self) -> bytes:
        """RECORD_BYTES, the last ones of which are their checksum."""
        fields = _FIELDS.pack(
            _MAGIC, DISK_FORMAT, self.kind, self.segment_id, self.slot, self.sequence, self.layout.block_bytes,
            self.key, self.layout.fingerprint, self.checksum,
        ).ljust(_PADDED, b"\0")  # fmt: skip
        return fields + xxhash.xxh3_128_digest(fields)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> "DiskRecord | None":
        """Reads the first RECORD_BYTES of data; None: they are none of this format, or torn."""
        data = bytes(data[:RECORD_BYTES])
        if len(data) < RECORD_BYTES or data[: len(_MAGIC)] != _MAGIC or xxhash.xxh3_128_digest(data[:_PADDED]) != data[_PADDED:]:
            return None
        _, version, kind, segment_id, slot, sequence, length, key, fingerprint, checksum = _FIELDS.unpack_from(data)
        if version != DISK_FORMAT or kind not in (RecordKind.BLOCK, RecordKind.DROPPED):
            return None
        return cls(RecordKind(kind), BlockKey(key), Layout(fingerprint, length), checksum, segment_id, slot, sequence)


def slot_bytes(block_bytes: int) -> int:
    """Room that a block takes on disk: header and bytes, rounded up."""
    return HEADER_BYTES - (-block_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class IndexContent:
    """What an index file says.

    Attributes:
        records: in the order of their writing.
        is_damaged: there is something wrong before its last good record, so it may lack blocks.
        num_good_bytes: up to the end of its last good record.
    """

    records: list[DiskRecord]
    is_damaged: bool
    num_good_bytes: int


def read_index(data: bytes) -> IndexContent:
    """Reads an index. A bad tail is what a crash leaves of the last write; a bad record before good ones is damage."""
    records: list[DiskRecord] = []
    num_good_bytes = 0
    for start, record in _records(data):
        if record is not None:
            records.append(record)
            num_good_bytes = start + RECORD_BYTES
    return IndexContent(records, len(records) * RECORD_BYTES != num_good_bytes, num_good_bytes)


def live_records(records: list[DiskRecord]) -> list[DiskRecord]:
    """One record per key and per slot, the youngest, without those that were dropped since; oldest first."""
    by_slot: dict[tuple[int, int], DiskRecord] = {}
    for record in records:
        place = (record.segment_id, record.slot)
        other = by_slot.get(place)
        if other is None or record.sequence >= other.sequence:
            by_slot[place] = record
    # All records: an older copy of a block that was dropped may lie in a slot that was free already.
    by_key: dict[BlockKey, DiskRecord] = {r.key: r for r in records if r.kind is RecordKind.DROPPED}
    for record in sorted(by_slot.values(), key=lambda record: record.sequence):
        if record.key not in by_key or record.sequence > by_key[record.key].sequence:
            by_key[record.key] = record
    return sorted((r for r in by_key.values() if r.kind is RecordKind.BLOCK), key=lambda record: record.sequence)


def _records(data: bytes) -> Iterator[tuple[int, DiskRecord | None]]:
    view = memoryview(data)
    for start in range(0, len(data), RECORD_BYTES):
        yield start, DiskRecord.unpack(view[start : start + RECORD_BYTES])
