"""Slots of the disk, who uses them, and the files that they are in. Data only; the table decides."""

import enum
from dataclasses import dataclass

from common.ids import BlockKey
from kvstore_svc.core.block import Layout
from kvstore_svc.core.disk_record import DiskRecord

MAX_USES = 3


class SlotState(enum.Enum):
    """WRITING -> READABLE -> GONE; what fails to be written goes at once. A slot is free when GONE and nobody reads it."""

    WRITING = "writing"
    READABLE = "readable"
    GONE = "gone"


class Lack(enum.Enum):
    """Why a block gets no slot."""

    PRESENT = "the block is here or being written"
    GROWTH = "a new segment is needed, and allowed"
    RETIREMENT = "another layout's segment is to be given up first"
    ROOM = "every slot is in use, or the block is larger than the disk tier"


@dataclass(slots=True, eq=False)
class DiskBlock:
    """One block in one slot; equal only to itself.

    Attributes:
        num_uses: since the clock's hand passed, at most MAX_USES.
        is_durable: it would survive a loss of power.
        is_suspect: a sync after its write failed; nobody will know.
    """

    record: DiskRecord
    state: SlotState = SlotState.WRITING
    num_readers: int = 0
    num_uses: int = 0
    is_durable: bool = False
    is_suspect: bool = False

    @property
    def key(self) -> BlockKey:
        """Of the block."""
        return self.record.key

    @property
    def layout(self) -> Layout:
        """Of the block."""
        return self.record.layout


@dataclass(slots=True, eq=False)
class Segment:
    """One file.

    Attributes:
        slots: users by slot; None: free.
        used_at: tick of the last use of a block in it.
    """

    segment_id: int
    slot_bytes: int
    slots: list[DiskBlock | None]
    free: list[int]
    used_at: int = 0

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return self.slot_bytes * len(self.slots)

    @property
    def is_idle(self) -> bool:
        """Nobody reads or writes in it."""
        return not any(b is not None and (b.num_readers or b.state is SlotState.WRITING) for b in self.slots)
