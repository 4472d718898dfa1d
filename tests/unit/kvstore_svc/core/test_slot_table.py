"""Slots: who gets one, who loses one, and that no two blocks ever share one."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.ids import BlockKey
from kvstore_svc.core.block import Layout
from kvstore_svc.core.disk_record import slot_bytes
from kvstore_svc.core.slot import DiskBlock, Lack, SlotState
from kvstore_svc.core.slot_table import SlotTable

PAGE = 4096
SMALL = Layout(b"s" * 32, PAGE)
LARGE = Layout(b"l" * 32, 3 * PAGE)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def grow(table: SlotTable, layout: Layout) -> None:
    table.add_segment(*table.new_segment(layout))


def write(table: SlotTable, number: int, layout: Layout = SMALL) -> DiskBlock:
    """Writes a block, with all that has to happen before."""
    while True:
        block = table.begin_write(key(number), layout, bytes(16))
        if block is Lack.GROWTH:
            grow(table, layout)
        elif block is Lack.RETIREMENT:
            segment_id = table.segment_to_retire(layout)
            assert segment_id is not None
            table.retire(segment_id)
        else:
            assert isinstance(block, DiskBlock), block
            table.end_write(block, is_written=True)
            return block


def full_table(num_blocks: int = 16) -> SlotTable:
    """Eight segments of two small slots each."""
    table = SlotTable(16 * 2 * PAGE, 4 * PAGE)
    for number in range(num_blocks):
        write(table, number)
    return table


def present(table: SlotTable, *numbers: int) -> list[int]:
    return [number for number in numbers if table.block(key(number)) is not None]


def test_segments_are_added_up_to_the_capacity_and_not_beyond() -> None:
    table = full_table()
    assert table.allocated_bytes == table.capacity_bytes == table.used_bytes

    write(table, 16)

    assert table.allocated_bytes == table.capacity_bytes
    assert (table.num_blocks, table.num_evictions) == (16, 1)
    table.check_integrity()


def test_the_oldest_block_that_nobody_used_goes_first() -> None:
    table = full_table()
    table.contains(key(0))
    held = table.begin_read(key(1))
    assert held is not None

    write(table, 16)

    assert present(table, *range(17)) == [0, 1, *range(3, 17)]
    table.end_read(held)
    table.check_integrity()


def test_each_use_is_worth_a_round_up_to_three() -> None:
    table = full_table()
    for _ in range(9):
        table.contains(key(0))
    for number in range(16, 16 + 2 * 16):
        write(table, number)

    assert present(table, 0) == [0]
    for number in range(64, 64 + 16):
        write(table, number)
    assert present(table, 0) == []


def test_a_block_that_is_read_keeps_its_slot_though_all_others_go() -> None:
    table = full_table()
    held = table.begin_read(key(0))
    assert held is not None
    for number in range(16, 99):
        write(table, number)

    assert held.state is SlotState.READABLE
    table.end_read(held)
    table.check_integrity()


def test_a_failed_write_gives_its_slot_back() -> None:
    table = full_table(1)
    block = table.begin_write(key(1), SMALL, bytes(16))
    assert isinstance(block, DiskBlock)
    assert table.begin_write(key(1), SMALL, bytes(16)) is Lack.PRESENT
    assert table.block(key(1)) is None

    table.end_write(block, is_written=False)

    table.check_integrity()
    assert isinstance(table.begin_write(key(1), SMALL, bytes(16)), DiskBlock)


def test_a_layout_without_room_gets_the_segment_that_was_used_least_recently() -> None:
    table = full_table()
    for number in range(2, 16):
        table.contains(key(number))

    write(table, 100, LARGE)

    assert present(table, 0, 1, 2, 3, 100) == [2, 3, 100]
    assert table.allocated_bytes <= table.capacity_bytes
    table.check_integrity()


def test_a_model_that_is_not_used_any_more_leaves_its_room_to_the_next() -> None:
    table = full_table()
    for number in range(100, 140):
        write(table, number, LARGE)

    assert present(table, *range(16)) == []
    assert table.used_bytes > table.capacity_bytes // 2
    table.check_integrity()


def test_a_layout_in_use_keeps_its_segments() -> None:
    table = full_table()
    for number in range(100, 140):
        for used in range(14):
            table.contains(key(used))
        write(table, number, LARGE)

    assert len(present(table, *range(16))) >= 12
    table.check_integrity()


def test_a_block_larger_than_the_disk_tier_finds_no_room() -> None:
    assert SlotTable(4 * PAGE, 4 * PAGE).begin_write(key(1), Layout(b"h" * 32, 4 * PAGE), bytes(16)) is Lack.ROOM


def test_without_growth_others_are_evicted() -> None:
    table = full_table(2)
    table.stop_growth()
    write(table, 3)
    assert table.num_evictions == 1

    table.resume_growth()

    assert table.begin_write(key(4), SMALL, bytes(16)) is Lack.GROWTH


def test_what_records_say_is_restored_and_what_cannot_be_is_not() -> None:
    table = full_table(6)
    records = [block.record for block in table.readable()]
    other = SlotTable(table.capacity_bytes, 4 * PAGE)
    for segment_id in table.segment_ids[:-1]:
        other.add_segment(segment_id, slot_bytes(PAGE), 2)

    assert other.restore([*records, records[0]]) == 4

    other.check_integrity()
    assert present(other, *range(6)) == [0, 1, 2, 3]
    new = write(other, 50)
    assert new.record.sequence > max(record.sequence for record in records)
    assert new.record.segment_id not in (1, 2)


class SlotMachine(RuleBasedStateMachine):
    """Readers, writers and droppers in any order, over what lies in each slot."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(24 * PAGE, 6 * PAGE)
        self.disk: dict[tuple[int, int], BlockKey] = {}
        self.writing: list[DiskBlock] = []
        self.reading: list[DiskBlock] = []
        self.dropped: list[DiskBlock] = []

    @rule(number=st.integers(0, 12), is_large=st.booleans())
    def begin_write(self, number: int, is_large: bool) -> None:
        layout = LARGE if is_large else SMALL
        block = self.table.begin_write(key(number * 2 + is_large), layout, bytes(16))
        match block:
            case DiskBlock():
                self.disk[block.record.segment_id, block.record.slot] = block.key
                self.writing.append(block)
            case Lack.GROWTH:
                grow(self.table, layout)
            case Lack.RETIREMENT:
                segment_id = self.table.segment_to_retire(layout)
                assert segment_id is not None
                self.table.retire(segment_id)

    @precondition(lambda self: self.writing)
    @rule(pick=st.integers(0, 99), is_written=st.booleans())
    def end_write(self, pick: int, is_written: bool) -> None:
        block = self.writing.pop(pick % len(self.writing))
        assert self.table.block(block.key) is None, "readable before it is written"
        self.table.end_write(block, is_written=is_written)
        assert (self.table.block(block.key) is block) == is_written

    @rule(number=st.integers(0, 25))
    def begin_read(self, number: int) -> None:
        block = self.table.begin_read(key(number))
        if block is not None:
            self.reading.append(block)

    @precondition(lambda self: self.reading)
    @rule(pick=st.integers(0, 99))
    def end_read(self, pick: int) -> None:
        self.table.end_read(self.reading.pop(pick % len(self.reading)))

    @rule(number=st.integers(0, 25))
    def drop(self, number: int) -> None:
        block = self.table.block(key(number))
        if block is not None:
            record = self.table.drop(block)
            assert record.sequence > block.record.sequence
            self.dropped.append(block)

    @precondition(lambda self: self.dropped)
    @rule()
    def free_dropped(self) -> None:
        self.table.free_dropped(self.dropped.pop())

    @rule(number=st.integers(0, 25))
    def use(self, number: int) -> None:
        self.table.contains(key(number))

    @invariant()
    def what_is_read_or_readable_is_not_overwritten(self) -> None:
        for block in [*self.reading, *self.table.readable(), *self.writing]:
            assert self.disk[block.record.segment_id, block.record.slot] == block.key

    @invariant()
    def is_sound(self) -> None:
        self.table.check_integrity()
        assert self.table.used_bytes <= self.table.allocated_bytes <= self.table.capacity_bytes


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=60, stateful_step_count=60)
