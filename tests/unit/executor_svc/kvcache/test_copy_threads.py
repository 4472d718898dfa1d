"""Copies by threads: bytes, checksums of the right side, and memory that is nobody's business after the end."""

import os

import pytest

from common.shm.checksum import checksum
from executor_svc.kvcache.copy_threads import Copy, Copying, CopyThreads


def checksums(copying: Copying) -> list[bytes]:
    found: list[bytes] = []
    while copying.is_under_way:
        found += copying.next()
    return found


@pytest.mark.parametrize("num_bytes", [1, 4096, 384 * 1024, 384 * 1024 + 1, 9 << 20])
def test_every_byte_is_copied_and_hashed(num_bytes: int) -> None:
    blocks = [memoryview(os.urandom(num_bytes)) for _ in range(3)]
    room = [memoryview(bytearray(num_bytes)) for _ in blocks]
    copying = CopyThreads().begin()

    copying.add([Copy(into, data, into) for into, data in zip(room[:2], blocks[:2], strict=True)])
    copying.add([Copy(room[2], blocks[2], blocks[2])])

    assert checksums(copying) == [checksum(data) for data in blocks]
    assert room == blocks


def test_nothing_is_nothing() -> None:
    copying = CopyThreads().begin()
    copying.add([])
    assert checksums(copying) == []
    copying.close()


def test_what_was_closed_is_not_written_any_more() -> None:
    """Broken off after the first: what has begun is waited for, the rest never begins."""
    data = memoryview(b"x" * (9 << 20))
    room = [memoryview(bytearray(len(data))) for _ in range(12)]
    copying = CopyThreads(1).begin()
    copying.add([Copy(into, data, into) for into in room])
    copying.next()

    copying.close()

    begun = [into for into in room if into[0]]
    assert room[0] == data
    assert all(into == data for into in begun)
    for into in room:
        into[0] = 0
    copying.close()
    assert not any(into[0] for into in room)


def test_a_copy_that_cannot_be_made_says_so() -> None:
    copying = CopyThreads().begin()
    copying.add([Copy(memoryview(bytes(8)), memoryview(b"x" * 8), memoryview(b"x" * 8))])
    with pytest.raises(ValueError, match="read-only"):
        copying.next()
    copying.close()
