"""Slabs: memory that two mappings share, that keeps its size and says what it is."""

import errno
import os

import pytest

from common.errors import NoSharedMemory
from common.shm.slab import MIN_SLAB_BYTES, PAGE_BYTES, Slab, SlabHeader, create_slab

MIB = 1 << 20


@pytest.mark.parametrize("size_bytes", [MIN_SLAB_BYTES, MIB, 3 * MIB + PAGE_BYTES, 256 * MIB])
def test_header_generations_and_pages_fill_a_slab(size_bytes: int) -> None:
    header = SlabHeader.for_size(0, size_bytes, epoch=1, nonce=2)

    generations_end = PAGE_BYTES + 8 * header.num_pages
    assert generations_end <= header.data_offset
    assert header.data_offset + header.num_pages * PAGE_BYTES == size_bytes
    assert header.data_offset - generations_end < 2 * PAGE_BYTES, "room for another page is lost"


def test_header_bytes_are_those_of_the_layout_page() -> None:
    header = SlabHeader(slab_id=3, epoch=0x1122334455667788, nonce=5, size_bytes=MIB, num_pages=254, data_offset=8192)

    assert header.pack()[:8] == b"OCTAVOKV"
    assert header.pack()[8:12] == bytes([1, 0, 0, 0])
    assert header.pack()[12:16] == bytes([3, 0, 0, 0])
    assert header.pack()[16:24] == bytes.fromhex("8877665544332211")
    assert SlabHeader.unpack(memoryview(header.pack())) == header


def test_two_mappings_see_the_same_bytes() -> None:
    owned = create_slab(0, MIB, epoch=1, nonce=2)
    other = Slab(owned.fd, MIB)
    owned.close()

    other.view(3, 5)[:] = b"hello"
    owned.slab.generations[3] = 9

    assert bytes(owned.slab.view(3, 5)) == b"hello"
    assert other.generations[3] == 9
    assert other.header == owned.slab.header


def test_a_slab_cannot_change_its_size() -> None:
    owned = create_slab(0, MIB, epoch=1, nonce=2)

    for size_bytes in (0, 2 * MIB):
        with pytest.raises(OSError, match="Operation not permitted") as caught:
            os.ftruncate(owned.fd, size_bytes)
        assert caught.value.errno == errno.EPERM
    owned.close()


def test_memory_that_is_no_slab_is_refused() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, MIB)

    with pytest.raises(NoSharedMemory, match="magic"):
        Slab(fd, MIB)
    os.close(fd)


def test_a_slab_of_another_size_than_announced_is_refused() -> None:
    owned = create_slab(0, 2 * MIB, epoch=1, nonce=2)

    with pytest.raises(NoSharedMemory, match="2097152 bytes, the store said 1048576"):
        Slab(owned.fd, MIB)
    owned.close()
