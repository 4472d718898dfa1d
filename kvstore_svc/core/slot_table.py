"""Which block lies in which slot of the disk, and which one goes when room is needed. Knows numbers; not files or bytes.

The disk is segments, files of equal slots; layouts of equal size share them. Rules:
    - A slot has one user: a block that is written, a block that can be read, or nobody. What is being read or written is
      not given to another block.
    - Eviction is CLOCK: blocks are looked at in the order of their writing; one that was used since the last look gets
      another round for each use, up to three. A sweep frees a few slots at once (high and low watermark).
    - A layout that has no room left gets the segment of another one, if that was used less recently than all of its own.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.ids import BlockKey
from kvstore_svc.core.block import Layout
from kvstore_svc.core.disk_record import DiskRecord, RecordKind, slot_bytes
from kvstore_svc.core.slot import MAX_USES, DiskBlock, Lack, Segment, SlotState

# A sweep frees this share of a layout's slots.
_SWEEP_SHARE = 64


@dataclass(slots=True)
class _SlotClass:
    """Segments of equal slots, and the clock over their readable blocks, the hand at the front."""

    segments: list[Segment] = field(default_factory=list)
    clock: OrderedDict[BlockKey, DiskBlock] = field(default_factory=OrderedDict)


class SlotTable:
    """See the module's first lines.

    Args:
        capacity_bytes: of all segments together.
        segment_bytes: size of a new one; but at most an eighth of the capacity, so that layouts can share it, at least 1/256
            of it, because each is an open file, and at least one slot.
    """

    def __init__(self, capacity_bytes: int, segment_bytes: int):
        self.capacity_bytes = capacity_bytes
        self.num_evictions = 0
        self._limit_bytes = capacity_bytes
        self._segment_bytes = min(max(segment_bytes, capacity_bytes // 256), capacity_bytes // 8)
        self._segments: dict[int, Segment] = {}
        self._classes: dict[int, _SlotClass] = {}
        self._blocks: dict[BlockKey, DiskBlock] = {}
        self._next_segment_id = 1
        self._next_sequence = 1
        self._tick = 0

    # Segments

    def add_segment(self, segment_id: int, size: int, num_slots: int) -> None:
        """A file of num_slots slots of size bytes is there."""
        segment = Segment(segment_id, size, [None] * num_slots, list(range(num_slots - 1, -1, -1)), self._tick)
        self._segments[segment_id] = segment
        self._classes.setdefault(size, _SlotClass()).segments.append(segment)
        self._next_segment_id = max(self._next_segment_id, segment_id + 1)

    def new_segment(self, layout: Layout) -> tuple[int, int, int]:
        """(segment_id, slot_bytes, num_slots) of the next segment for a layout; numbers are not used again."""
        size = slot_bytes(layout.block_bytes)
        self._next_segment_id += 1
        return self._next_segment_id - 1, size, max(1, self._segment_bytes // size)

    def segment_to_retire(self, layout: Layout | None) -> int | None:
        """The idle segment that was used least recently, and not of the layout's own size; None: there is none."""
        own = slot_bytes(layout.block_bytes) if layout is not None else 0
        others = [segment for segment in self._segments.values() if segment.slot_bytes != own and segment.is_idle]
        return min(others, key=lambda segment: segment.used_at).segment_id if others else None

    def retire(self, segment_id: int) -> int:
        """Forgets a segment, which must be idle, and its blocks; returns how many those were."""
        segment = self._segments.pop(segment_id)
        assert segment.is_idle, f"segment {segment_id} is in use"
        blocks = [block for block in segment.slots if block is not None]
        for block in blocks:
            self._forget(block)
        slot_class = self._classes[segment.slot_bytes]
        slot_class.segments.remove(segment)
        if not slot_class.segments:
            del self._classes[segment.slot_bytes]
        return len(blocks)

    def stop_growth(self) -> None:
        """There is no room for more segments, whatever the capacity says."""
        self._limit_bytes = self.allocated_bytes

    def resume_growth(self) -> None:
        """There may be room again."""
        self._limit_bytes = self.capacity_bytes

    # Writing

    def begin_write(self, key: BlockKey, layout: Layout, checksum: bytes) -> DiskBlock | Lack:
        """A slot for a block, evicting others if need be."""
        if key in self._blocks:
            return Lack.PRESENT
        size = slot_bytes(layout.block_bytes)
        slot_class = self._classes.get(size)
        segment = self._with_free_slot(slot_class)
        if segment is None:
            lack = self._lack(size, slot_class)
            if lack is not None:
                return lack
            self._sweep(size)
            segment = self._with_free_slot(slot_class)
            if segment is None:
                return Lack.ROOM
        slot = segment.free.pop()
        record = DiskRecord(RecordKind.BLOCK, key, layout, checksum, segment.segment_id, slot, self._next_sequence)
        self._next_sequence += 1
        block = DiskBlock(record)
        segment.slots[slot] = block
        segment.used_at = self._next_tick()
        self._blocks[key] = block
        return block

    def end_write(self, block: DiskBlock, *, is_written: bool) -> None:
        """The block is readable from now on, or its slot is free again."""
        if is_written:
            block.state = SlotState.READABLE
            self._class_of(block).clock[block.key] = block
        else:
            self._forget(block)
            self._free(block)

    def restore(self, records: Iterable[DiskRecord]) -> int:
        """Blocks that were found at the start, oldest first; what can not be where its record says is left out.

        Returns:
            How many can be read now.
        """
        num_restored = 0
        for record in records:
            segment = self._segments.get(record.segment_id)
            self._next_sequence = max(self._next_sequence, record.sequence + 1)
            if (
                segment is None
                or not 0 <= record.slot < len(segment.slots)
                or segment.slots[record.slot] is not None
                or slot_bytes(record.layout.block_bytes) != segment.slot_bytes
                or record.key in self._blocks
            ):
                continue
            block = DiskBlock(record, SlotState.READABLE, is_durable=True)
            segment.slots[record.slot] = block
            self._blocks[record.key] = block
            self._classes[segment.slot_bytes].clock[record.key] = block
            num_restored += 1
        for segment in self._segments.values():
            segment.free = [slot for slot in reversed(range(len(segment.slots))) if segment.slots[slot] is None]
        return num_restored

    # Reading

    def contains(self, key: BlockKey) -> bool:
        """Whether the block is readable. Somebody asks for it, so it counts as a use."""
        block = self._blocks.get(key)
        if block is None or block.state is not SlotState.READABLE:
            return False
        self._use(block)
        return True

    def block(self, key: BlockKey) -> DiskBlock | None:
        """The readable block of a key, without using it."""
        block = self._blocks.get(key)
        return block if block is not None and block.state is SlotState.READABLE else None

    def begin_read(self, key: BlockKey) -> DiskBlock | None:
        """Holds a block in its slot; None: it is not here."""
        block = self.block(key)
        if block is not None:
            block.num_readers += 1
            self._use(block)
        return block

    def end_read(self, block: DiskBlock) -> None:
        """Lets go of it."""
        block.num_readers -= 1
        self._free(block)

    # Removing

    def drop(self, block: DiskBlock) -> DiskRecord:
        """Forgets a block; its slot stays taken until free_dropped, so that its header can be wiped before.

        Returns:
            What the index has to say of it.
        """
        block.num_readers += 1  # ours, until free_dropped
        self._forget(block)
        old = block.record
        self._next_sequence += 1
        return DiskRecord(
            RecordKind.DROPPED, old.key, old.layout, old.checksum, old.segment_id, old.slot, self._next_sequence - 1
        )

    def free_dropped(self, block: DiskBlock) -> None:
        """The header of a dropped block is wiped."""
        self.end_read(block)

    def readable(self, fingerprint: bytes | None = None) -> list[DiskBlock]:
        """Readable blocks of a layout or of all."""
        return [
            block
            for slot_class in self._classes.values()
            for block in slot_class.clock.values()
            if fingerprint in (None, block.layout.fingerprint)
        ]

    def has_only(self, segment_id: int, dropped: Sequence[DiskBlock]) -> bool:
        """Whether nothing lies in a segment but these dropped blocks, which nobody else reads."""
        users = [block for block in self._segments[segment_id].slots if block is not None]
        return len(users) == len(dropped) and all(block.num_readers == 1 for block in dropped)

    def take_free(self, segment_id: int) -> list[int]:
        """Slots that nobody uses; until give_free nobody gets them."""
        segment = self._segments[segment_id]
        free, segment.free = segment.free, []
        return free

    def give_free(self, segment_id: int, slots: Sequence[int]) -> None:
        """Gives back what take_free gave."""
        self._segments[segment_id].free += slots

    # Looking

    @property
    def next_sequence(self) -> int:
        """Larger than that of every record so far."""
        return self._next_sequence

    @property
    def num_blocks(self) -> int:
        """Readable blocks."""
        return sum(len(slot_class.clock) for slot_class in self._classes.values())

    @property
    def used_bytes(self) -> int:
        """Slots of readable blocks."""
        return sum(size * len(slot_class.clock) for size, slot_class in self._classes.items())

    @property
    def allocated_bytes(self) -> int:
        """All segments."""
        return sum(segment.num_bytes for segment in self._segments.values())

    @property
    def segment_ids(self) -> list[int]:
        """Of all segments."""
        return list(self._segments)

    # Inside

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick

    def _use(self, block: DiskBlock) -> None:
        if block.num_uses < MAX_USES:
            block.num_uses += 1
        self._tick += 1
        self._segments[block.record.segment_id].used_at = self._tick

    def _class_of(self, block: DiskBlock) -> _SlotClass:
        return self._classes[slot_bytes(block.layout.block_bytes)]

    def _with_free_slot(self, slot_class: _SlotClass | None) -> Segment | None:
        if slot_class is None:
            return None
        return next((segment for segment in slot_class.segments if segment.free), None)

    def _lack(self, size: int, slot_class: _SlotClass | None) -> Lack | None:
        """Whether room is to come from outside of the class; None: from a sweep."""
        new_bytes = max(1, self._segment_bytes // size) * size
        if new_bytes > self._limit_bytes:
            return Lack.ROOM if slot_class is None else None
        if self.allocated_bytes + new_bytes <= self._limit_bytes:
            return Lack.GROWTH
        others = [s for s in self._segments.values() if s.slot_bytes != size and s.is_idle]
        if slot_class is None:
            return Lack.RETIREMENT if others else Lack.ROOM
        own = min(segment.used_at for segment in slot_class.segments)
        return Lack.RETIREMENT if any(other.used_at < own for other in others) else None

    def _sweep(self, size: int) -> None:
        """Moves the clock's hand until some slots are free."""
        slot_class = self._classes[size]
        wanted = max(1, sum(len(segment.slots) for segment in slot_class.segments) // _SWEEP_SHARE)
        for _ in range((MAX_USES + 1) * len(slot_class.clock)):
            if wanted == 0:
                return
            key, block = next(iter(slot_class.clock.items()))
            if block.num_uses or block.num_readers:
                block.num_uses = max(0, block.num_uses - 1)
                slot_class.clock.move_to_end(key)
                continue
            self._forget(block)
            self._free(block)
            self.num_evictions += 1
            wanted -= 1

    def _forget(self, block: DiskBlock) -> None:
        """Nobody finds the block any more."""
        if block.state is SlotState.READABLE:
            del self._class_of(block).clock[block.key]
        if block.state is not SlotState.GONE:
            del self._blocks[block.key]
        block.state = SlotState.GONE

    def _free(self, block: DiskBlock) -> None:
        """Frees the slot of a block that is gone, unless somebody still reads it."""
        if block.state is not SlotState.GONE or block.num_readers:
            return
        segment = self._segments.get(block.record.segment_id)
        if segment is not None and segment.slots[block.record.slot] is block:
            segment.slots[block.record.slot] = None
            segment.free.append(block.record.slot)

    def check_integrity(self) -> None:
        """Raises AssertionError unless slots, clocks and keys agree."""
        seen: dict[BlockKey, DiskBlock] = {}
        for segment in self._segments.values():
            assert segment in self._classes[segment.slot_bytes].segments, f"segment {segment.segment_id} is in no class"
            free = [slot for slot, block in enumerate(segment.slots) if block is None]
            assert sorted(segment.free) == free, f"segment {segment.segment_id}: free slots {sorted(segment.free)}, {free} are"
            for slot, block in enumerate(segment.slots):
                if block is None:
                    continue
                assert (block.record.segment_id, block.record.slot) == (segment.segment_id, slot), f"{block} is elsewhere"
                if block.state is SlotState.GONE:
                    assert block.num_readers > 0, f"{block} is gone and keeps its slot"
                    continue
                assert self._blocks.get(block.key) is block, f"{block} cannot be found"
                seen[block.key] = block
                clock = self._classes[segment.slot_bytes].clock
                assert (clock.get(block.key) is block) == (block.state is SlotState.READABLE), f"{block} and its clock"
        assert seen.keys() == self._blocks.keys(), "keys without a slot"
        assert sum(len(c.clock) for c in self._classes.values()) == self.num_blocks
