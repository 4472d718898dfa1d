"""The checksum is pinned: stores and clients of different versions must agree."""

from common.shm.checksum import CHECKSUM_BYTES, Checksum, checksum


def test_golden_values() -> None:
    assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum(b"octavo").hex() == "7d55611d5c05ec0b37d9270d496fbb19"
    assert len(checksum(b"octavo")) == CHECKSUM_BYTES


def test_any_buffer_of_the_same_bytes_has_the_same_checksum() -> None:
    assert checksum(memoryview(bytearray(b"octavo"))) == checksum(b"octavo")


def test_pieces_have_the_checksum_of_the_whole() -> None:
    data = bytes(range(256)) * 40
    pieces = Checksum()
    for start in range(0, len(data), 777):
        pieces.update(data[start : start + 777])
    assert pieces.digest() == checksum(data)
