"""Blocks that lie in this process's own memory: their bytes travel by plain copies. Knows bytes and checksums, no pool."""

from collections import deque
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from executor_svc.core.host_block import HostBlock
from executor_svc.kvcache.copy_threads import Copy, Copying, CopyThreads


class HostBuffers:
    """A BlockSink and a BlockSource (executor_svc/core/host_block.py).

    Attributes:
        block_bytes: of each buffer.
    """

    def __init__(self, buffers: Sequence[memoryview], block_bytes: int, threads: CopyThreads):
        """Looks at no byte.

        Args:
            buffers: one for each index; contiguous, block_bytes long, and writable if they are to be filled.
            block_bytes: of each.
            threads: that copy.

        Raises:
            ValueError: a buffer has another length, or is not contiguous.
        """
        for data in buffers:
            if data.nbytes != block_bytes or not data.c_contiguous:
                raise ValueError(f"a buffer of {data.nbytes} bytes: it must be contiguous and have {block_bytes} bytes")
        self.block_bytes = block_bytes
        self._buffers = buffers
        self._threads = threads

    def begin(self) -> "HostFilling":
        """See BlockSink."""
        return HostFilling(self._buffers, self._threads.begin())

    def write_to(self, places: Sequence[HostBlock]) -> list[bytes]:
        """See BlockSource. The checksums are those of what was meant to be written."""
        sums: list[bytes] = []
        with closing(self._threads.begin()) as copying:
            buffers = [self._buffers[place.index] for place in places]
            copying.add([Copy(place.data, data, data) for place, data in zip(places, buffers, strict=True)])
            while copying.is_under_way:
                sums += copying.next()
        return sums


class HostFilling:
    """A Filling, by copies of threads."""

    def __init__(self, buffers: Sequence[memoryview], copying: Copying):
        self._buffers = buffers
        self._copying = copying
        self._wanted: deque[bytes] = deque()

    @property
    def is_under_way(self) -> bool:
        """See Filling."""
        return self._copying.is_under_way

    @property
    def is_full(self) -> bool:
        """See Filling. What has not begun can be broken off at once."""
        return False

    def add(self, blocks: Sequence[HostBlock]) -> None:
        """See Filling."""
        buffers = [self._buffers[block.index] for block in blocks]
        self._wanted.extend(block.checksum for block in blocks)
        self._copying.add([Copy(into, block.data, into) for into, block in zip(buffers, blocks, strict=True)])

    def verdicts(self) -> list[bool]:
        """See Filling. It is the copy that is verified."""
        return [found == self._wanted.popleft() for found in self._copying.next()]

    def close(self) -> None:
        """See Filling."""
        self._copying.close()


def copy_bytes(into: memoryview, data: memoryview) -> None:
    """At memory speed; numpy lets other threads run meanwhile."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))
