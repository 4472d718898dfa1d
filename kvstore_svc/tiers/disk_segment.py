"""One segment file: preallocated slots, read and written straight between the file and memory. Knows bytes and descriptors.

Does not know which block lies where. All calls may block: they are made from threads.

A file's name says its number and the size of its slots, so that nothing in it has to be trusted to read it:
segment-00000007-741376.kv. With O_DIRECT the kernel's page cache has no part in it: what shared memory holds is not held
twice. It wants aligned memory and lengths: where the file system or a block's length does not allow it, the second
descriptor is used, and the page cache told to forget.
"""

import errno
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from kvstore_svc.core.disk_record import HEADER_BYTES, RECORD_BYTES, SLOT_ALIGNMENT_BYTES
from kvstore_svc.tiers.disk_index import sync_folder

_NAME = re.compile(r"segment-(\d{8})-(\d+)\.kv")


class SegmentFile:
    """See the module's first lines.

    Attributes:
        path: of the file.
        segment_id: its number.
        slot_bytes: of each slot.
        num_slots: in the file.
        is_direct: whether the page cache is passed by where lengths allow it.
    """

    def __init__(self, path: Path, segment_id: int, slot_bytes: int):
        """Opens an existing file.

        Raises:
            OSError: it cannot be opened.
        """
        self.path = path
        self.segment_id = segment_id
        self.slot_bytes = slot_bytes
        self._direct_fd = _open_direct(path)
        self.is_direct = self._direct_fd is not None
        # For what O_DIRECT does not take; opened when it is needed first.
        self._cached_fd: int | None = None
        self._opening = threading.Lock()
        self.num_slots = path.stat().st_size // slot_bytes

    @classmethod
    def create(cls, folder: Path, segment_id: int, slot_bytes: int, num_slots: int) -> "SegmentFile":
        """Creates a file with all its room.

        Raises:
            OSError: there is no room; nothing is left behind.
        """
        path = folder / f"segment-{segment_id:08d}-{slot_bytes}.kv"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, slot_bytes * num_slots)
            os.fsync(fd)
            sync_folder(folder)
            return cls(path, segment_id, slot_bytes)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)

    def write(self, slot: int, header: bytes, data: memoryview) -> None:
        """Writes header and bytes of a block in one call.

        Raises:
            OSError: it did not work; what is in the slot now is undefined.
        """
        page = _page()
        page[: len(header)] = header
        page[len(header) :] = bytes(HEADER_BYTES - len(header))
        self._do(os.pwritev, slot, [page, data])

    def read(self, slot: int, into: memoryview) -> bytes:
        """Reads a block's bytes; returns the slot's header.

        Raises:
            OSError: it did not work, or the file ends too early; what is in into is undefined.
        """
        page = _page()
        self._do(os.preadv, slot, [page, into])
        return bytes(page[:RECORD_BYTES])

    def read_header(self, slot: int) -> bytes:
        """The slot's header alone.

        Raises:
            OSError: it did not work.
        """
        page = _page()
        self._do(os.preadv, slot, [page])
        return bytes(page[:RECORD_BYTES])

    def wipe(self, slots: Iterable[int]) -> None:
        """Overwrites headers: nobody finds a block in these slots any more.

        Raises:
            OSError: it did not work.
        """
        page = _page()
        page[:] = bytes(HEADER_BYTES)
        for slot in slots:
            self._do(os.pwritev, slot, [page])

    def sync(self) -> None:
        """Returns when all that was written would survive a loss of power.

        Raises:
            OSError: it may not.
        """
        if self._direct_fd is not None:
            os.fdatasync(self._direct_fd)
        if self._cached_fd is not None:
            os.fdatasync(self._cached_fd)
            os.posix_fadvise(self._cached_fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def remove(self) -> None:
        """Deletes the file.

        Raises:
            OSError: it is still there.
        """
        self.close()
        self.path.unlink()

    def close(self) -> None:
        """Closes the descriptors."""
        for fd in (self._direct_fd, self._cached_fd):
            if fd is not None:
                os.close(fd)

    def _do(self, call: Callable[[int, list[memoryview], int], int], slot: int, buffers: list[memoryview]) -> None:
        """One call for all buffers at the start of a slot."""
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        offset = slot * self.slot_bytes
        if self.is_direct and self._direct_fd is not None and num_bytes % SLOT_ALIGNMENT_BYTES == 0:
            try:
                return _check(call(self._direct_fd, buffers, offset), num_bytes)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.is_direct = False  # this file system promises what it does not keep
        fd = self._cached()
        num_done = call(fd, buffers, offset)
        if call is os.preadv:
            os.posix_fadvise(fd, offset, self.slot_bytes, os.POSIX_FADV_DONTNEED)
        return _check(num_done, num_bytes)

    def _cached(self) -> int:
        with self._opening:
            if self._cached_fd is None:
                self._cached_fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            return self._cached_fd


def find_segments(folder: Path) -> list[tuple[Path, int, int]]:
    """(path, segment_id, slot_bytes) of the segment files in a folder, oldest first.

    Raises:
        OSError: the folder cannot be read.
    """
    found = []
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is not None and int(match[2]) >= 2 * SLOT_ALIGNMENT_BYTES and int(match[2]) % SLOT_ALIGNMENT_BYTES == 0:
            found.append((path, int(match[1]), int(match[2])))
    return found


_pages = threading.local()


def _page() -> memoryview:
    """A page of this thread's own, aligned as O_DIRECT wants it."""
    page: memoryview | None = getattr(_pages, "page", None)
    if page is None:
        page = _pages.page = memoryview(mmap.mmap(-1, HEADER_BYTES))
    return page


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def _check(num_done: int, num_bytes: int) -> None:
    if num_done != num_bytes:
        raise OSError(errno.EIO, f"{num_done} of {num_bytes} bytes")
