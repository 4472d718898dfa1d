"""The checksum is pinned: stores and clients of different versions must agree."""

from common.shm.checksum import CHECKSUM_BYTES, checksum


def test_golden_values() -> None:
    assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum(b"octavo").hex() == "7d55611d5c05ec0b37d9270d496fbb19"
    assert len(checksum(b"octavo")) == CHECKSUM_BYTES


def test_any_buffer_of_the_same_bytes_has_the_same_checksum() -> None:
    assert checksum(memoryview(bytearray(b"octavo"))) == checksum(b"octavo")
