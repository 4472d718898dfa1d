"""Plain copies between buffers and lent memory: the bytes, their verdicts, and buffers that are the caller's bug."""

import pytest

from common.shm.checksum import checksum
from executor_svc.core.host_block import HostBlock
from executor_svc.kvcache.copy_threads import CopyThreads
from executor_svc.kvcache.host_buffers import HostBuffers
from tests.unit.executor_svc.filled import filled


def test_bytes_come_and_go_by_index() -> None:
    into = [memoryview(bytearray(8)) for _ in range(3)]
    buffers = HostBuffers(into, 8, CopyThreads())
    lent = [memoryview(bytes([value]) * 8) for value in (1, 2)]
    wrong = checksum(b"other")

    assert filled(buffers, [HostBlock(2, lent[0], checksum(lent[0])), HostBlock(0, lent[1], wrong)]) == [True, False]
    place = memoryview(bytearray(8))
    assert buffers.write_to([HostBlock(2, place)]) == [checksum(lent[0])]
    assert (bytes(place), bytes(into[1])) == (b"\1" * 8, bytes(8))


def test_a_buffer_of_another_size_is_named() -> None:
    with pytest.raises(ValueError, match="a buffer of 7 bytes: it must be contiguous and have 8 bytes"):
        HostBuffers([memoryview(bytes(8)), memoryview(bytes(7))], 8, CopyThreads())
    with pytest.raises(ValueError, match="contiguous"):
        HostBuffers([memoryview(bytes(16))[::2]], 8, CopyThreads())


def test_a_buffer_that_cannot_be_written_is_refused_when_it_is_filled() -> None:
    data = memoryview(bytes(8))
    with pytest.raises(ValueError, match="read-only"):
        filled(HostBuffers([memoryview(bytes(8))], 8, CopyThreads()), [HostBlock(0, data, checksum(data))])
