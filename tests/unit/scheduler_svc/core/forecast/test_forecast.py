import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.forecast.forecast import LEVELS, Forecast


def _number(value: float) -> Forecast:
    return Forecast(10, (value,) * len(LEVELS))


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_error_of_a_number_is_its_absolute_error(value: float, outcome: float) -> None:
    assert _number(value).error(outcome) == pytest.approx(abs(value - outcome), rel=1e-9, abs=1e-9)


def test_a_distribution_around_the_outcome_errs_less_than_its_most_distant_numbers() -> None:
    forecast = Forecast(10, tuple(100 * level for level in LEVELS))
    assert forecast.error(50) < 20 < forecast.error(100)


def test_quantiles_between_the_levels_are_interpolated_and_end_at_the_outermost() -> None:
    forecast = Forecast(10, tuple(100 * level for level in LEVELS))
    assert forecast.quantile(0.5) == forecast.median == pytest.approx(50)
    assert forecast.quantile(0.525) == pytest.approx(52.5)
    assert forecast.quantile(0.0) == pytest.approx(5)
    assert forecast.quantile(0.999) == pytest.approx(95)
    assert forecast.mean == pytest.approx(50)


def test_a_share_of_a_forecast() -> None:
    assert _number(10).times(0.5).median == 5
