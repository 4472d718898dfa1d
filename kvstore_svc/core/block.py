"""A block of the store and its states. Data only."""

import enum
from dataclasses import dataclass

from common.ids import BlockKey
from kvstore_svc.core.place import Place


class BlockState(enum.Enum):
    """Where a block is in its life.

    RESERVED -> COMMITTED -> (evicted: gone)
        |           └-----> DROPPED while somebody reads it -> gone with its last reader
        ├-> aborted: gone
        └-> QUARANTINED: its writer is fenced but alive -> gone when the writer's process is gone
    """

    RESERVED = "reserved"
    COMMITTED = "committed"
    DROPPED = "dropped"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Layout:
    """Blocks of equal size and meaning.

    Attributes:
        fingerprint: 32 bytes.
        block_bytes: bytes of each block.
    """

    fingerprint: bytes
    block_bytes: int


@dataclass(slots=True, eq=False)
class Block:
    """One block; equal only to itself.

    Attributes:
        checksum: xxh3-128 of its bytes; empty until the commit.
        num_readers: read leases on it.
    """

    key: BlockKey
    layout: Layout
    place: Place
    state: BlockState = BlockState.RESERVED
    checksum: bytes = b""
    num_readers: int = 0
