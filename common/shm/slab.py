"""One piece of shared memory as bytes: who creates it, how it is laid out, how it is mapped. See docs/kv-layout.md.

Knows memfd, mmap and the layout of a slab. Does not know blocks, keys, leases or sockets.

    0            PAGE_BYTES             data_offset                                   size_bytes
    | header     | generations, u64 per page | page 0 | page 1 | ... | page num_pages - 1 |

No lock and no pointer lies in shared memory: a process that dies while it writes can spoil nothing but its own block.
"""

import errno
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.errors import NoSharedMemory, StartupError
from common.shm.available_memory import available_memory_bytes

PAGE_BYTES = 4096
SHM_ABI = 1
MIN_SLAB_BYTES = 4 * PAGE_BYTES
_MAGIC = b"OCTAVOKV"
_HEADER = struct.Struct("<8sHHIQQQQQ")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """The first bytes of a slab.

    Attributes:
        slab_id: number of the slab within its store.
        epoch: of the store that created it.
        nonce: random; tells this memory from any other.
        size_bytes: all of the slab.
        num_pages: pages for data.
        data_offset: where page 0 begins.
    """

    slab_id: int
    epoch: int
    nonce: int
    size_bytes: int
    num_pages: int
    data_offset: int

    @classmethod
    def for_size(cls, slab_id: int, size_bytes: int, *, epoch: int, nonce: int) -> "SlabHeader":
        """Divides size_bytes (a multiple of PAGE_BYTES, at least MIN_SLAB_BYTES) into header, generations and data pages."""
        num_pages = (size_bytes - PAGE_BYTES) // (PAGE_BYTES + 8)
        while PAGE_BYTES + _round_up(8 * num_pages) + num_pages * PAGE_BYTES > size_bytes:
            num_pages -= 1
        return cls(slab_id, epoch, nonce, size_bytes, num_pages, size_bytes - num_pages * PAGE_BYTES)

    def pack(self) -> bytes:
        """The bytes at the start of the slab."""
        return _HEADER.pack(
            _MAGIC, SHM_ABI, 0, self.slab_id, self.epoch, self.nonce, self.size_bytes, self.num_pages, self.data_offset
        )

    @classmethod
    def unpack(cls, data: memoryview) -> "SlabHeader":
        """Reads a slab's first bytes.

        Raises:
            NoSharedMemory: they are not those of a slab of this ABI.
        """
        magic, abi, _, *fields = _HEADER.unpack_from(data)
        if magic != _MAGIC or abi != SHM_ABI:
            raise NoSharedMemory(f"slab header has magic {magic!r} and ABI {abi}, expected {_MAGIC!r} and {SHM_ABI}")
        return cls(*fields)


class Slab:
    """A mapped slab, of its owner or of a client. Unmapped when the last view of it is gone.

    Attributes:
        header: as in its first bytes.
        generations: uint64 [num_pages], in shared memory: generation of the place that a page belongs to, 0 for free pages.
        data: uint8 [num_pages * PAGE_BYTES], in shared memory.
    """

    def __init__(self, fd: int, size_bytes: int):
        """Maps size_bytes of fd; the caller may close fd afterwards.

        Raises:
            OSError: it cannot be mapped.
            NoSharedMemory: it is not a slab of size_bytes.
        """
        mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED)
        whole = memoryview(mapping)
        self.header = SlabHeader.unpack(whole)
        header = self.header
        if header.size_bytes != size_bytes or header.data_offset + header.num_pages * PAGE_BYTES != size_bytes:
            raise NoSharedMemory(f"slab {header.slab_id} says it has {header.size_bytes} bytes, the store said {size_bytes}")
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(mapping, np.uint64, header.num_pages, PAGE_BYTES)
        self.data = whole[header.data_offset :]
        self._mapping = mapping

    def populate(self) -> None:
        """Has the kernel prepare every page of this mapping now: on virtual machines the first touch of a page costs 1 us.

        Raises:
            OSError: the memory is not to be had.
        """
        try:
            self._mapping.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: Linux before 5.14, where the pages are prepared on first use
                raise

    def view(self, start_page: int, length_bytes: int) -> memoryview:
        """The first length_bytes of a place, writable."""
        start = start_page * PAGE_BYTES
        return self.data[start : start + length_bytes]


@dataclass(frozen=True)
class OwnedSlab:
    """A slab and the descriptor that is handed to clients."""

    slab: Slab
    fd: int

    def close(self) -> None:
        """Closes the descriptor; the memory lives as long as anybody maps it."""
        os.close(self.fd)


def create_slab(slab_id: int, size_bytes: int, *, epoch: int, nonce: int) -> OwnedSlab:
    """Creates shared memory that is there in full, cannot change its size and has no name.

    Every page is touched here, so that memory runs out now, with an error, not later with a signal, and so that the pages
    are charged to this process and not to its clients.

    Raises:
        StartupError: the memory is not to be had.
    """
    available_bytes = available_memory_bytes()
    if size_bytes > available_bytes:  # the kernel would fill pages until it has to kill a process of its choice
        raise StartupError(
            f"cannot allocate {size_bytes} bytes of shared memory: {available_bytes} are available; lower --capacity-bytes"
        )
    header = SlabHeader.for_size(slab_id, size_bytes, epoch=epoch, nonce=nonce)
    fd = os.memfd_create(f"octavo-slab-{slab_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
        os.pwrite(fd, header.pack(), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        slab = Slab(fd, size_bytes)
        slab.populate()
        return OwnedSlab(slab, fd)
    except OSError as error:
        os.close(fd)
        raise StartupError(f"cannot allocate {size_bytes} bytes of shared memory: {error}; lower --capacity-bytes") from error


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
