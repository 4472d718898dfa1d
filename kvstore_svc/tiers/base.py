"""What a tier below shared memory promises. Knows keys and bytes, not leases, sessions or gRPC.

A tier hashes what has arrived, on the thread that read it, while the bytes are still near; who asked for the block compares.
So a tier may return wrong bytes, but never another block's checksum.
Blocks are immutable and content-addressed: a key has one value for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.ids import BlockKey
from kvstore_svc.core.block import Layout


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """What is kept beside a block's bytes.

    Attributes:
        checksum: xxh3-128 of the bytes.
    """

    key: BlockKey
    layout: Layout
    checksum: bytes


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block that came up.

    Attributes:
        stored: what was kept beside its bytes.
        measured: xxh3-128 of the bytes that have arrived.
    """

    stored: StoredBlock
    measured: bytes

    @property
    def is_intact(self) -> bool:
        """Whether they are the bytes that were stored."""
        return self.measured == self.stored.checksum


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Of one tier: gauges of now, counters since its start.

    Attributes:
        num_bad: what was kept under a key and was not the block; each counts as a miss too.
        unavailable_reason: why the tier is left alone for the moment, for people; empty: it is not.
    """

    capacity_bytes: int
    used_bytes: int
    num_blocks: int
    num_hits: int
    num_misses: int
    num_evictions: int
    num_writes: int
    num_bad: int = 0
    unavailable_reason: str = ""


class LowerTier(Protocol):
    """A slower and larger place for blocks. No method raises for a device or a server that fails: that is a miss.

    Attributes:
        name: "disk" or "redis".
    """

    name: str

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each key is here now. It may be gone when get asks for it."""
        ...

    async def get(self, key: BlockKey, into: memoryview) -> FoundBlock | None:
        """Writes a block's bytes.

        Args:
            key: of the block.
            into: writable, as long as the block; what is in it after a miss is undefined. The tier must not write to it
                after get has returned or has been cancelled.

        Returns:
            What was kept beside the bytes, and what has come of them; None: not here, of another length, or the tier failed.
        """
        ...

    async def put(self, block: StoredBlock, data: memoryview) -> bool:
        """Keeps a copy; a key that is here already is left alone. data is valid until put returns.

        Returns:
            False: no room, or the tier failed.
        """
        ...

    async def evict(self, key: BlockKey) -> bool:
        """Forgets a block; False: it was not here. A get of it that is under way may still succeed."""
        ...

    async def clear(self, fingerprint: bytes | None) -> int:
        """Forgets every block of a layout, or all; returns how many."""
        ...

    def counts(self) -> TierCounts:
        """For GetStats."""
        ...
