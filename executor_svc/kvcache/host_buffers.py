"""Blocks that lie in this process's own memory: their bytes travel by plain copies. Knows bytes and checksums, no pool."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from common.shm.checksum import checksum
from executor_svc.core.host_block import HostBlock


class HostBuffers:
    """A BlockSink and a BlockSource (executor_svc/core/host_block.py).

    Attributes:
        block_bytes: of each buffer.
    """

    def __init__(self, buffers: Sequence[memoryview], block_bytes: int):
        """Looks at no byte.

        Args:
            buffers: one for each index; contiguous, block_bytes long, and writable if they are to be filled.
            block_bytes: of each.

        Raises:
            ValueError: a buffer has another length, or is not contiguous.
        """
        for data in buffers:
            if data.nbytes != block_bytes or not data.c_contiguous:
                raise ValueError(f"a buffer of {data.nbytes} bytes: it must be contiguous and have {block_bytes} bytes")
        self.block_bytes = block_bytes
        self._buffers = buffers

    def begin(self) -> "HostFilling":
        """See BlockSink."""
        return HostFilling(self._buffers)

    def write_to(self, places: Sequence[HostBlock]) -> list[bytes]:
        """See BlockSource. The checksums are those of what was meant to be written."""
        sums: list[bytes] = []
        for place in places:
            data = self._buffers[place.index]
            copy_bytes(place.data, data)
            sums.append(checksum(data))
        return sums


class HostFilling:
    """A Filling: nothing happens beside the caller, so a block is copied when its verdict is asked for."""

    def __init__(self, buffers: Sequence[memoryview]):
        self._buffers = buffers
        self._blocks: deque[HostBlock] = deque()

    @property
    def is_under_way(self) -> bool:
        """See Filling."""
        return bool(self._blocks)

    @property
    def is_full(self) -> bool:
        """See Filling."""
        return False

    def add(self, blocks: Sequence[HostBlock]) -> None:
        """See Filling."""
        self._blocks.extend(blocks)

    def verdicts(self) -> list[bool]:
        """See Filling. It is the copy that is verified."""
        block = self._blocks.popleft()
        into = self._buffers[block.index]
        copy_bytes(into, block.data)
        return [checksum(into) == block.checksum]

    def close(self) -> None:
        """See Filling."""
        self._blocks.clear()


def copy_bytes(into: memoryview, data: memoryview) -> None:
    """At memory speed; numpy lets other threads run meanwhile."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))
