"""Simulated runs beside a real one: what is said of their distance."""

import pytest

from scheduler_svc.simulation.arrivals import Arrival
from scheduler_svc.simulation.comparison import compare
from scheduler_svc.simulation.outcome import Served


def served(*ttfts: float | None, tpot_s: float = 0.1) -> list[Served]:
    arrival = Arrival(0.0, 1, 3, lambda: (1,))
    return [Served(arrival, ttft, None if ttft is None else ttft + 2 * tpot_s, 3) for ttft in ttfts]


def test_the_middle_of_several_runs_is_compared_and_how_far_they_are_apart() -> None:
    real = served(1.0, 2.0, 4.0)
    ttft, tpot = compare(real, [served(0.9, 1.8, 3.6), served(1.0, 2.0, 4.0), served(1.2, 2.4, 4.8)])

    assert ttft.median_error == ttft.p90_error == ttft.error_of_median == 0.0
    assert ttft.median_error_of_one == pytest.approx(0.1)
    assert ttft.median_between == pytest.approx((1 / 9 + 0.2) / 2)
    assert tpot.median_error == pytest.approx(0.0)
    assert "median error 0.0 %" in str(ttft) and "two simulated runs differ by 15.6 %" in str(ttft)


def test_requests_without_a_first_token_are_left_out() -> None:
    ttft, _ = compare(served(1.0, None, 2.0), [served(1.5, 1.0, None)])

    assert (ttft.real_s, ttft.simulated_s, ttft.median_error, ttft.median_between) == (1.0, 1.5, 0.5, None)


def test_nothing_is_said_of_nothing() -> None:
    assert compare(served(None), [served(1.0)]) == []
