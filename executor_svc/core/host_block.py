"""Blocks in host memory, and the two who carry their bytes: what the pool and the block store's client agree on.

The client lends memory, its own or the store's; the pool decides how the bytes travel. Knows no device, no call and no lease.
"""

from collections.abc import Generator, Sequence
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


class BlockSink(Protocol):
    """Pool blocks that wait for their bytes, of one load."""

    @property
    def block_bytes(self) -> int:
        """Of each block."""
        ...

    def fill(self, blocks: Sequence[HostBlock]) -> Generator[bool, None, None]:
        """Brings bytes into the pool's blocks of the same indices.

        Yields:
            For each block, in order: whether the bytes are those of its checksum. By then they are in the pool, for every step
            that is submitted from now on, and nothing reads the lent memory any more.
            A block behind the last one that was yielded may have been written too.
            Once the generator is closed nothing reads any of the memory.
        """
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
