"""What this process may still take."""

from common.shm.available_memory import available_memory_bytes


def test_it_is_more_than_nothing_and_less_than_the_address_space() -> None:
    assert 1 << 20 < available_memory_bytes() < 1 << 60
