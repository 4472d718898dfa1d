"""Half a record is no record; an index that lost its end is good, one that lost its middle says so."""

from hypothesis import given
from hypothesis import strategies as st

from common.ids import BlockKey
from kvstore_svc.core.block import Layout
from kvstore_svc.core.disk_record import RECORD_BYTES, DiskRecord, RecordKind, live_records, read_index, slot_bytes

LAYOUT = Layout(b"f" * 32, 5000)


def record(number: int, *, slot: int = 0, sequence: int = 1, kind: RecordKind = RecordKind.BLOCK) -> DiskRecord:
    return DiskRecord(kind, BlockKey(number.to_bytes(32, "big")), LAYOUT, bytes([number]) * 16, 7, slot, sequence)


def packed(records: list[DiskRecord]) -> bytes:
    return b"".join(r.pack() for r in records)


RECORDS = st.lists(st.builds(record, st.integers(0, 9), slot=st.integers(0, 9), sequence=st.integers(1, 99)), max_size=8)


def test_a_slot_is_a_page_and_whole_pages_for_the_block() -> None:
    assert [slot_bytes(n) for n in (1, 4096, 4097)] == [8192, 8192, 12288]


@given(RECORDS)
def test_records_come_back(records: list[DiskRecord]) -> None:
    content = read_index(packed(records))

    assert content.records == records
    assert not content.is_damaged
    assert content.num_good_bytes == len(records) * RECORD_BYTES


@given(RECORDS, st.integers(0, 8 * RECORD_BYTES), st.binary(max_size=2 * RECORD_BYTES))
def test_a_torn_end_is_no_damage(records: list[DiskRecord], num_bytes: int, garbage: bytes) -> None:
    whole = packed(records)[:num_bytes]

    content = read_index(whole + garbage)

    assert content.records[: num_bytes // RECORD_BYTES] == records[: num_bytes // RECORD_BYTES]
    assert not content.is_damaged


@given(RECORDS.filter(lambda records: len(records) > 1), st.data())
def test_any_flipped_bit_costs_its_record_and_is_told_if_others_follow(records: list[DiskRecord], data: st.DataObject) -> None:
    index = bytearray(packed(records))
    at = data.draw(st.integers(0, len(index) * 8 - 1))
    index[at // 8] ^= 1 << at % 8
    bad = at // 8 // RECORD_BYTES

    content = read_index(bytes(index))

    assert content.records == records[:bad] + records[bad + 1 :]
    assert content.is_damaged == (bad < len(records) - 1)


def test_the_youngest_record_of_a_slot_counts() -> None:
    assert live_records([record(1, sequence=1), record(2, sequence=2)]) == [record(2, sequence=2)]


def test_the_youngest_record_of_a_key_counts() -> None:
    old, young = record(1, slot=1, sequence=1), record(1, slot=2, sequence=5)

    assert live_records([young, old]) == [young]


def test_a_dropped_block_does_not_come_back_from_an_older_copy() -> None:
    old, young = record(1, slot=1, sequence=1), record(1, slot=2, sequence=2)
    dropped = record(1, slot=2, sequence=3, kind=RecordKind.DROPPED)

    assert live_records([old, young, dropped]) == []
    assert live_records([old, young, dropped, record(1, slot=4, sequence=4)]) == [record(1, slot=4, sequence=4)]


def test_what_another_version_wrote_is_not_read() -> None:
    data = bytearray(record(1).pack())
    data[8] += 1

    assert DiskRecord.unpack(bytes(data)) is None
    assert DiskRecord.unpack(b"") is None
