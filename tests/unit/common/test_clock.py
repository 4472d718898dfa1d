"""Clocks that only move forward."""

from common.clock import ManualClock, MonotonicClock


def test_a_manual_clock_stands_still_until_it_is_turned() -> None:
    clock = ManualClock(5.0)
    assert (clock.now(), clock.now()) == (5.0, 5.0)

    clock.advance(1.5)

    assert clock.now() == 6.5


def test_the_machines_clock_never_goes_back() -> None:
    clock = MonotonicClock()
    times = [clock.now() for _ in range(100)]

    assert times == sorted(times)
