"""Blocks in host memory, and the two who carry their bytes: what the pool and the block store's client agree on.

The client lends memory, its own or the store's; the pool decides how the bytes travel. Knows no device, no call and no lease.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class HostBlock:
    """Memory of one block, lent until whoever carries its bytes says that it is done.

    Attributes:
        index: of the block in its transfer.
        data: contiguous, as long as a block.
        checksum: of the bytes that should be there; empty: a place that is to be written.
    """

    index: int
    data: memoryview
    checksum: bytes = b""


class Filling(Protocol):
    """Blocks on their way into the pool, in the order in which they were added.

    Attributes:
        is_under_way: some were added whose verdict was not asked for.
        is_full: more should not be added before the next verdicts, or breaking off would take long.
    """

    @property
    def is_under_way(self) -> bool:
        """See above."""
        ...

    @property
    def is_full(self) -> bool:
        """See above."""
        ...

    def add(self, blocks: Sequence[HostBlock]) -> None:
        """Starts to bring bytes into the pool's blocks of the same indices."""
        ...

    def verdicts(self) -> Sequence[bool]:
        """Waits for the oldest blocks that are under way.

        Returns:
            For each, in order: whether the bytes are those of its checksum. By now they are in the pool, for every step that is
            submitted from now on, and nothing reads their lent memory any more. Later blocks may have been written, too.
        """
        ...

    def close(self) -> None:
        """When it returns, nothing reads any of the lent memory, nor when it raises what the device failed with."""
        ...


class BlockSink(Protocol):
    """Pool blocks that wait for their bytes, of one load."""

    @property
    def block_bytes(self) -> int:
        """Of each block."""
        ...

    def begin(self) -> Filling:
        """Starts to fill them; ends with close."""
        ...


class BlockSource(Protocol):
    """Pool blocks that are to be stored, of one save."""

    @property
    def block_bytes(self) -> int:
        """Of each block."""
        ...

    def write_to(self, places: Sequence[HostBlock]) -> list[bytes]:
        """Writes the bytes of the pool's blocks of the same indices.

        Returns:
            The checksum of each, in order. Nothing writes the lent memory any more, nor after an exception.
        """
        ...
