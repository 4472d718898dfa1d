import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.forecast.experts import Level
from scheduler_svc.core.forecast.forecast import LEVELS, Forecast
from scheduler_svc.core.forecast.series import CountSeries
from tests.unit.scheduler_svc.core.forecast.loads import counts


def _back_test(load: list[int], horizon_s: int, warm_up_s: int) -> tuple[list[Forecast], list[float]]:
    """Forecasts, and what came."""
    series, totals, made = CountSeries((horizon_s,)), [0, *accumulate(load)], []
    for count in load:
        series.note(count)
        made.append(series.horizons[horizon_s].newest)
    ends = range(warm_up_s, len(load) - horizon_s + 1)
    return [made[end - 1] for end in ends], [float(totals[end + horizon_s] - totals[end]) for end in ends]


def _error(forecasts: list[Forecast], outcomes: list[float]) -> float:
    return sum(abs(f.median - y) for f, y in zip(forecasts, outcomes, strict=True)) / sum(outcomes)


def test_expects_what_has_always_come() -> None:
    forecasts, _ = _back_test([3] * 300, 10, 200)
    assert forecasts[-1].median == pytest.approx(30)
    assert forecasts[-1].quantile(0.9) == pytest.approx(30, rel=0.02)


def test_knows_nothing_before_the_first_second_and_expects_nothing_of_nothing() -> None:
    series = CountSeries((10,))
    assert series.horizons[10].newest.median == 0
    for _ in range(50):
        series.note(0)
    assert series.horizons[10].newest.quantile(0.95) == pytest.approx(0, abs=1e-3)


def test_says_how_sure_it_is() -> None:
    forecasts, outcomes = _back_test(counts(2000, lambda second: 6.0), 10, 300)
    inside = sum(f.quantile(0.1) <= y <= f.quantile(0.9) for f, y in zip(forecasts, outcomes, strict=True))
    assert 0.72 < inside / len(outcomes) < 0.88
    mean = forecasts[-1].mean
    assert 45 < mean < 75


def test_a_steady_load_is_forecast_about_as_well_as_by_who_knows_its_rate() -> None:
    forecasts, outcomes = _back_test(counts(2000, lambda second: 6.0, seed=1), 10, 400)
    knowing = sum(abs(60 - y) for y in outcomes) / sum(outcomes)
    assert _error(forecasts, outcomes) < 1.12 * knowing


@pytest.mark.parametrize("period_s", [60, 300])
def test_jobs_at_round_times_are_foreseen(period_s: int) -> None:
    load = counts(period_s * 14, lambda second: 8.0 if second % period_s < period_s // 4 else 0.3)
    forecasts, outcomes = _back_test(load, 10, period_s * 8)
    level, smoothed = Level(10), []
    for count in load:
        level.note(count)
        smoothed.append(10 * level.rate(10))
    first = period_s * 8
    pairs = zip(smoothed[first - 1 :], outcomes, strict=False)
    assert _error(forecasts, outcomes) < 0.6 * sum(abs(s - y) for s, y in pairs) / sum(outcomes)


def test_follows_a_load_that_changes_for_good() -> None:
    forecasts, _ = _back_test(counts(1500, lambda second: 2.0 if second < 1000 else 12.0), 10, 1200)
    late = [forecast.median for forecast in forecasts[-200:]]
    assert sum(late) / len(late) == pytest.approx(120, rel=0.1)


def test_counts_of_tokens_are_forecast_as_well_as_counts_of_requests() -> None:
    rng = random.Random(4)
    load = [sum(rng.randrange(100, 4000) for _ in range(n)) for n in counts(1500, lambda second: 5.0)]
    forecasts, outcomes = _back_test(load, 60, 600)
    assert _error(forecasts, outcomes) < 0.15
    inside = sum(f.quantile(0.05) <= y <= f.quantile(0.95) for f, y in zip(forecasts, outcomes, strict=True))
    assert inside / len(outcomes) > 0.75


def test_errors_are_those_of_the_forecasts_whose_time_is_over() -> None:
    series = CountSeries((10,))
    for count in counts(800, lambda second: 6.0):
        series.note(count)
    errors = series.horizons[10].errors
    assert 0.05 < errors.relative < errors.relative_of_median < 0.25


@given(st.lists(st.integers(0, 10**6), max_size=80), st.sampled_from([1, 7, 30]))
def test_any_load_gives_quantiles_that_rise_from_nothing(load: list[int], horizon_s: int) -> None:
    series = CountSeries((horizon_s,))
    for count in load:
        series.note(count)
        quantiles = series.horizons[horizon_s].newest.quantiles
        assert len(quantiles) == len(LEVELS)
        assert quantiles[0] >= 0.0
        assert list(quantiles) == sorted(quantiles)
