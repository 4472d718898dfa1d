"""Entries of block tables that say where blocks lie."""

import pytest

from executor_svc.core.block_address import PAGE_BYTES, page_entries

POOL = 0x7F00_0000_0000


def test_entries_are_pages_from_the_pool_in_either_direction() -> None:
    assert page_entries([POOL, POOL + 3 * PAGE_BYTES, POOL - PAGE_BYTES, 0x1000_0000], POOL) == [
        0,
        3,
        -1,
        (0x1000_0000 - POOL) >> 12,
    ]


def test_an_address_between_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="not a whole number of 4096 bytes"):
        page_entries([POOL + 64], POOL)
