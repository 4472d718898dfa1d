"""Which conversations are expected to go on, and when."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import BlockKey
from scheduler_svc.core.forecast.gaps import Gaps
from scheduler_svc.core.forecast.turns import Turns


def keys_of(user: int, num_blocks: int) -> list[BlockKey]:
    return [BlockKey(user.to_bytes(16, "big") + block.to_bytes(16, "big")) for block in range(num_blocks)]


def taught(gap_s: float = 10.0, num_users: int = 12) -> tuple[Turns, float]:
    """Users who came back once, each after the same gap."""
    turns, now_s = Turns(), 1000.0
    for user in range(num_users):
        turns.note_end(keys_of(user, 4), now_s)
        turns.note_arrival(keys_of(user, 7), now_s + gap_s)
    return turns, now_s + gap_s


def users_of(turns: Turns, now_s: float, window_s: float, least: float = 0.3) -> list[int]:
    return [int.from_bytes(one.keys[0][:16], "big") for one in turns.expected(now_s, window_s, least)]


def test_nobody_is_expected_before_some_have_come_again() -> None:
    turns = Turns()
    turns.note_end(keys_of(1, 4), 0.0)
    assert turns.expected(5.0, 60.0, 0.0) == []


def test_who_left_first_is_expected_first() -> None:
    turns, now_s = taught()
    for user, ago_s in ((1, 2.0), (2, 8.0), (3, 5.0)):
        turns.note_end(keys_of(user, 4), now_s - ago_s)
    assert users_of(turns, now_s, 60.0) == [2, 3, 1]
    assert users_of(turns, now_s, 3.0) == [2]


def test_who_has_come_again_is_not_expected_any_more() -> None:
    turns, now_s = taught()
    turns.note_end(keys_of(1, 4), now_s)
    turns.note_arrival(keys_of(1, 9), now_s + 5)
    assert turns.expected(now_s + 5, 60.0, 0.0) == []


def test_an_unrelated_prompt_or_a_branch_before_the_end_is_no_next_turn() -> None:
    turns, now_s = taught()
    turns.note_end(keys_of(1, 4), now_s)
    turns.note_arrival(keys_of(2, 9), now_s + 5)
    turns.note_arrival(keys_of(1, 3), now_s + 5)
    assert users_of(turns, now_s + 5, 60.0) == [1]


def test_who_is_long_overdue_is_not_expected() -> None:
    turns, now_s = taught()
    turns.note_end(keys_of(1, 4), now_s)
    assert users_of(turns, now_s + 8.0, 30.0) == [1]
    assert users_of(turns, now_s + 40.0, 30.0) == []


def test_when_hardly_anybody_comes_again_nobody_is_expected() -> None:
    turns, now_s = taught()
    for user in range(100, 1700):  # more than are remembered
        turns.note_end(keys_of(user, 4), now_s)
    assert turns.expected(now_s + 8.0, 30.0, 0.2) == []
    assert users_of(turns, now_s + 8.0, 30.0, 1e-6)[0] >= 100


def test_what_was_brought_up_is_counted_until_its_turn_comes_or_is_overdue() -> None:
    turns, now_s = taught()
    for user in (1, 2):
        turns.note_end(keys_of(user, 4), now_s)
    for conversation in turns.expected(now_s + 5, 30.0, 0.2):
        conversation.warmed_blocks = 4
    assert turns.num_warm_blocks == 8
    turns.note_arrival(keys_of(1, 6), now_s + 10)
    assert (turns.num_warm_blocks, turns.num_warm_used) == (4, 1)
    turns.expected(now_s + 100, 30.0, 0.2)
    assert (turns.num_warm_blocks, turns.num_warm_unused) == (0, 1)


def test_a_prompt_of_less_than_a_block_is_no_conversation() -> None:
    turns, now_s = taught()
    turns.note_end([], now_s)
    turns.note_arrival([], now_s)
    assert turns.expected(now_s, 60.0, 0.0) == []


@pytest.mark.parametrize("mean_s", [0.5, 30.0, 4000.0])
def test_gaps_are_learned_as_they_are_distributed(mean_s: float) -> None:
    gaps, rng = Gaps(), random.Random(3)
    for _ in range(3000):
        gaps.learn(rng.expovariate(1 / mean_s))
    assert gaps.share_within(mean_s) == pytest.approx(0.632, abs=0.06)
    assert gaps.quantile_s(0.5) == pytest.approx(0.693 * mean_s, rel=0.2)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.lists(st.floats(0, 2e6), min_size=2, max_size=2))
def test_shares_rise_from_nothing_to_all(learned: list[float], asked: list[float]) -> None:
    gaps = Gaps()
    for gap_s in learned:
        gaps.learn(gap_s)
    low, high = sorted(asked)
    assert 0 <= gaps.share_within(low) <= gaps.share_within(high) <= 1 + 1e-9
    assert gaps.share_within(1e9) == pytest.approx(1)
    assert gaps.share_within(gaps.quantile_s(0.5)) == pytest.approx(0.5, abs=1e-6) or len(learned) == 1
