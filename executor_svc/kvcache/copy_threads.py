"""Threads that copy blocks' bytes and hash them on the way: one pass over memory for both. Knows memory, not whose it is."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np

from common.shm.checksum import Checksum

_NUM_THREADS = 2
"""One does not fill the memory's bandwidth while it hashes; steps compute on the same cores, so there are no more."""
_PIECE_BYTES = 384 * 1024
"""Copied, then hashed out of the second-level cache. Threads meet at the interpreter lock after each: smaller ones lose more."""
_PART_BYTES = 8 << 20
"""A thread takes so much at a time: a hand-over costs as much as copying half a MiB, and verdicts come that much later."""


class Copy(NamedTuple):
    """One block's way.

    Attributes:
        into: writable, as long as data.
        data: contiguous.
        hashed: into or data: whose bytes the checksum is to be of.
    """

    into: memoryview
    data: memoryview
    hashed: memoryview


class Copying:
    """Copies under way, in the order in which they were added. Their memory is in use until close has returned."""

    def __init__(self, pool: ThreadPoolExecutor):
        self._pool = pool
        self._parts: deque[Future[list[bytes]]] = deque()

    @property
    def is_under_way(self) -> bool:
        """Whether next has something to wait for."""
        return bool(self._parts)

    def add(self, copies: Sequence[Copy]) -> None:
        """Starts copies of equal length."""
        num_together = max(1, _PART_BYTES // copies[0].data.nbytes) if copies else 1
        for start in range(0, len(copies), num_together):
            self._parts.append(self._pool.submit(_copy_all, copies[start : start + num_together]))

    def next(self) -> list[bytes]:
        """Waits for the oldest of them; their checksums."""
        checksums = self._parts[0].result()
        self._parts.popleft()
        return checksums

    def close(self) -> None:
        """Waits for what has begun; the rest never begins."""
        for part in self._parts:
            part.cancel()
        wait(self._parts)
        self._parts.clear()


class CopyThreads:
    """See the module's first lines. The threads start with the first copies and end with this object."""

    def __init__(self, num_threads: int = _NUM_THREADS):
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="copies")

    def begin(self) -> Copying:
        """For copies that belong together."""
        return Copying(self._pool)


def copy_and_hash(copy: Copy) -> bytes:
    """Copies all bytes; returns the checksum. Lets other threads run."""
    into, data, hashed = (np.frombuffer(memory, np.uint8) for memory in copy)
    sum_so_far = Checksum()
    for start in range(0, len(data), _PIECE_BYTES):
        piece = slice(start, start + _PIECE_BYTES)
        np.copyto(into[piece], data[piece])
        sum_so_far.update(hashed[piece].data)
    return sum_so_far.digest()


def _copy_all(copies: Sequence[Copy]) -> list[bytes]:
    return [copy_and_hash(copy) for copy in copies]
