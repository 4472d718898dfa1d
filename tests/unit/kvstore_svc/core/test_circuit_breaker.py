"""When a failing server is left alone, and when it is tried again."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore_svc.core.circuit_breaker import CircuitBreaker

MAX_FAILURES = 3
OFF_S = 5.0


def open_breaker() -> CircuitBreaker:
    breaker = CircuitBreaker(MAX_FAILURES, OFF_S)
    for _ in range(MAX_FAILURES):
        breaker.record(False, 10.0)
    assert not breaker.is_closed
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not_count_against_it() -> None:
    breaker = CircuitBreaker(MAX_FAILURES, OFF_S)

    for success in (False, False, True, False, False):
        breaker.record(success, 0.0)
        assert breaker.is_closed

    breaker.record(False, 0.0)
    assert not breaker.is_closed


def test_a_probe_is_due_when_the_time_is_over_and_only_one_at_a_time() -> None:
    breaker = open_breaker()

    assert not breaker.begin_probe(10.0 + OFF_S - 0.1)
    assert breaker.begin_probe(10.0 + OFF_S)
    assert not breaker.begin_probe(10.0 + OFF_S)


def test_a_good_probe_closes_it_and_a_bad_one_begins_another_pause() -> None:
    breaker = open_breaker()

    assert breaker.begin_probe(15.0)
    breaker.end_probe(False, 16.0)
    assert not breaker.begin_probe(20.9)
    assert breaker.begin_probe(21.0)
    breaker.end_probe(True, 21.0)

    assert breaker.is_closed
    assert not breaker.begin_probe(100.0)


def test_work_that_ends_late_neither_closes_it_nor_prolongs_the_pause() -> None:
    breaker = open_breaker()

    breaker.record(True, 11.0)
    breaker.record(False, 14.0)

    assert not breaker.is_closed
    assert breaker.begin_probe(15.0)


def test_it_is_off_until_a_probe_is_due_and_while_one_is_under_way() -> None:
    breaker = open_breaker()
    assert not CircuitBreaker(MAX_FAILURES, OFF_S).is_off(0.0)

    assert breaker.is_off(10.0 + OFF_S - 0.1)
    assert not breaker.is_off(10.0 + OFF_S)
    breaker.begin_probe(10.0 + OFF_S)
    assert breaker.is_off(20.0)
    breaker.end_probe(True, 20.0)
    assert not breaker.is_off(20.0)


def test_the_end_of_a_probe_that_never_began_is_an_error() -> None:
    with pytest.raises(ValueError, match="no probe"):
        open_breaker().end_probe(True, 20.0)


class Breaker(RuleBasedStateMachine):
    """Against a model that remembers everything that happened."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = CircuitBreaker(MAX_FAILURES, OFF_S)
        self.now = 0.0
        self.row = 0  # failures since the last success or probe
        self.opened_s: float | None = None
        self.is_probing = False

    @rule(seconds=st.floats(0.0, 2 * OFF_S))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(success=st.booleans())
    def work(self, success: bool) -> None:
        self.breaker.record(success, self.now)
        if self.opened_s is None:
            self.row = 0 if success else self.row + 1
            if self.row == MAX_FAILURES:
                self.opened_s = self.now

    @rule()
    def ask_for_a_probe(self) -> None:
        is_due = self.opened_s is not None and self.now >= self.opened_s + OFF_S and not self.is_probing
        assert self.breaker.begin_probe(self.now) == is_due
        self.is_probing |= is_due

    @precondition(lambda self: self.is_probing)
    @rule(success=st.booleans())
    def end_probe(self, success: bool) -> None:
        self.breaker.end_probe(success, self.now)
        self.is_probing = False
        self.row = 0
        self.opened_s = None if success else self.now

    @invariant()
    def is_closed_exactly_while_nothing_opened_it(self) -> None:
        assert self.breaker.is_closed == (self.opened_s is None)


TestBreaker = Breaker.TestCase
