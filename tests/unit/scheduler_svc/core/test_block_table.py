"""Block tables: what fits, and what the executor has yet to hear of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import BlockId
from scheduler_svc.core.block_table import BlockTable


def make_table(num_blocks: int, block_size: int = 4) -> BlockTable:
    table = BlockTable(block_size)
    table.block_ids = [BlockId(7 * i % 101) for i in range(num_blocks)]
    return table


def test_block_table_says_how_many_tokens_fit() -> None:
    table = make_table(3)

    assert table.num_slots == 12
    assert [table.num_missing(num_tokens) for num_tokens in (0, 12, 13, 17)] == [0, 0, 1, 2]


def test_each_block_is_sent_once_and_no_earlier_than_needed() -> None:
    table = make_table(3)

    assert table.take_unsent(1) == (0,)
    assert table.take_unsent(4) == ()
    assert table.take_unsent(12) == (7, 14)
    assert table.take_unsent(12) == ()


def test_tokens_beyond_the_blocks_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="13 tokens in 3 blocks of 4"):
        make_table(3).take_unsent(13)


def test_cleared_block_table_is_new() -> None:
    table = make_table(2)
    table.take_unsent(8)

    assert table.clear() == [0, 7]
    assert (table.num_slots, table.num_sent) == (0, 0)


@given(block_size=st.integers(1, 9), ends=st.lists(st.integers(0, 60), max_size=10))
def test_what_was_sent_is_a_prefix_that_holds_the_tokens(block_size: int, ends: list[int]) -> None:
    table = make_table(60, block_size)
    sent: list[BlockId] = []
    for end in sorted(ends):
        sent += table.take_unsent(end)
        assert sent == table.block_ids[: len(sent)]
        assert 0 <= len(sent) * block_size - end < block_size
