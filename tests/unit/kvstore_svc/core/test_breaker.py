"""A tier that fails again and again is left alone for a while."""

from kvstore_svc.core.breaker import Breaker


def test_failures_in_a_row_turn_it_off_for_a_while() -> None:
    breaker = Breaker(3, 10.0)
    for now in (1.0, 2.0):
        breaker.failed(now)
        assert not breaker.is_off(now)

    breaker.failed(3.0)

    assert breaker.is_off(12.9)
    assert not breaker.is_off(13.0)


def test_afterwards_one_failure_is_enough_and_one_success_ends_it() -> None:
    breaker = Breaker(3, 10.0)
    for _ in range(3):
        breaker.failed(0.0)
    breaker.failed(11.0)
    assert breaker.is_off(12.0)

    assert breaker.succeeded()
    assert not breaker.succeeded()
    breaker.failed(22.0)
    assert not breaker.is_off(22.0)


def test_a_success_between_failures_forgets_them() -> None:
    breaker = Breaker(2, 10.0)
    breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(1.0)

    assert not breaker.is_off(1.0)
