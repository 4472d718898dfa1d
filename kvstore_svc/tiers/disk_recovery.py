"""What a store finds on its disk when it starts. Knows files and the index; reads headers of slots, never a block's bytes.

The index says where blocks are. Where it says nothing of a segment, or is damaged, the headers of the slots say it. Neither
has to be true: whoever reads a block compares its header and its checksum.
"""

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvstore_svc.core.disk_record import DiskRecord, IndexContent, RecordKind, live_records
from kvstore_svc.core.slot_table import SlotTable
from kvstore_svc.tiers.disk_folder import DiskUnavailable, reason_of
from kvstore_svc.tiers.disk_index import IndexFile
from kvstore_svc.tiers.disk_segment import SegmentFile, find_segments

log = logging.getLogger(__name__)
_NUM_THREADS = 8


@dataclass
class Recovered:
    """What there is.

    Attributes:
        files: open segments by number.
        num_scanned: segments whose headers had to be read.
    """

    table: SlotTable
    files: dict[int, SegmentFile]
    index: IndexFile
    num_scanned: int


def recover(folder: Path, capacity_bytes: int, segment_bytes: int) -> Recovered:
    """Opens all segments, finds their blocks and writes a fresh index.

    Raises:
        DiskUnavailable: the folder cannot be read or written.
    """
    table, index = SlotTable(capacity_bytes, segment_bytes), IndexFile(folder)
    files: dict[int, SegmentFile] = {}
    try:
        for path, segment_id, slot_bytes in find_segments(folder):
            files[segment_id] = SegmentFile(path, segment_id, slot_bytes)
            table.add_segment(segment_id, slot_bytes, files[segment_id].num_slots)
        content = _read_index(index)
        known = set() if content.is_damaged else {record.segment_id for record in content.records}
        unknown = [file for segment_id, file in files.items() if segment_id not in known]
        table.restore(live_records([*content.records, *_scan(unknown)]))
        _shrink(table, files)
        index.rewrite(block.record for block in table.readable())
    except OSError as error:
        index.close()
        for file in files.values():
            file.close()
        raise DiskUnavailable(f"{folder}: {reason_of(error)}") from error
    return Recovered(table, files, index, len(unknown))


def _read_index(index: IndexFile) -> IndexContent:
    try:
        content = index.read()
    except OSError as error:
        log.warning("disk tier: the index cannot be read (%s); reading the headers of all slots", error)
        return IndexContent([], True, 0)
    if content.is_damaged:
        log.warning("disk tier: the index is damaged; reading the headers of all slots")
    return content


def _scan(files: Iterable[SegmentFile]) -> list[DiskRecord]:
    """The headers of all slots of some segments."""
    with ThreadPoolExecutor(_NUM_THREADS, "disk-scan") as threads:
        return [record for found in threads.map(_headers, files) for record in found]


def _headers(file: SegmentFile) -> list[DiskRecord]:
    found = []
    for slot in range(file.num_slots):
        try:
            record = DiskRecord.unpack(file.read_header(slot))
        except OSError as error:
            log.warning("disk tier: slot %d of %s cannot be read: %s", slot, file.path.name, error)
            continue
        if record is not None and record.kind is RecordKind.BLOCK and (record.segment_id, record.slot) == (file.segment_id, slot):
            found.append(record)
    return found


def _shrink(table: SlotTable, files: dict[int, SegmentFile]) -> None:
    """Gives segments up until they fit the capacity, which may have been larger before."""
    while table.allocated_bytes > table.capacity_bytes:
        segment_id = table.segment_to_retire(None)
        assert segment_id is not None, "nobody uses a segment yet"
        table.retire(segment_id)
        files.pop(segment_id).remove()
