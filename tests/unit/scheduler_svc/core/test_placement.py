"""Placement: prefix first, then load, and always the same for the same figures."""

from dataclasses import replace

import pytest

from common.errors import NoExecutor
from common.ids import ExecutorId
from scheduler_svc.core.placement import Candidate, choose_executor


def make_candidate(name: str, cached: int = 0, waiting: int = 0, running: int = 0, free: int = 0) -> Candidate:
    return Candidate(ExecutorId(name), cached, waiting, running, free)


def test_longest_prefix_wins() -> None:
    assert choose_executor([make_candidate("a", 16), make_candidate("b", 64), make_candidate("c")]) == "b"


def test_prefix_beats_running_sequences() -> None:
    assert choose_executor([make_candidate("a", 16, running=200), make_candidate("b")]) == "a"


def test_prefix_is_not_worth_a_longer_queue() -> None:
    assert choose_executor([make_candidate("a", 64, waiting=10_000), make_candidate("b")]) == "b"


def test_less_loaded_wins_without_a_prefix() -> None:
    assert choose_executor([make_candidate("a", running=3), make_candidate("b", running=2)]) == "b"
    assert choose_executor([make_candidate("a", free=3), make_candidate("b", free=4)]) == "b"


def test_equals_are_chosen_by_id_in_any_order() -> None:
    candidates = [make_candidate(name) for name in "bca"]

    assert choose_executor(candidates) == choose_executor(candidates[::-1]) == "a"


def test_no_candidate_is_an_error() -> None:
    with pytest.raises(NoExecutor):
        choose_executor([])


def test_the_first_to_be_through_wins_whatever_its_figures() -> None:
    near = replace(make_candidate("a", cached=64, running=200), finish_s=2.0)
    far = replace(make_candidate("b", waiting=100), finish_s=1.9)
    assert choose_executor([near, far]) == "b"


def test_times_that_hardly_differ_are_the_same() -> None:
    first = replace(make_candidate("a", running=3), finish_s=1.0001)
    second = replace(make_candidate("b", running=2), finish_s=1.0004)
    assert choose_executor([first, second]) == "b"


def test_as_long_as_one_is_not_known_tokens_decide() -> None:
    known = replace(make_candidate("a"), finish_s=0.1)
    assert choose_executor([known, make_candidate("b", cached=16)]) == "b"
