"""How wrong forecasts have been lately. Knows forecasts and outcomes; published as a metric."""

from scheduler_svc.core.forecast.forecast import Forecast

_HALF_LIFE_S = 600.0


class ForecastErrors:
    """Means over about a quarter of an hour, the newer the heavier."""

    def __init__(self) -> None:
        self._keep = 0.5 ** (1.0 / _HALF_LIFE_S)
        self._weight = 0.0
        self._error = 0.0
        self._absolute = 0.0
        self._outcome = 0.0

    def learn(self, forecast: Forecast, outcome: float) -> None:
        """A forecast's time is over."""
        keep = self._keep
        self._weight = keep * self._weight + 1.0
        self._error = keep * self._error + forecast.error(outcome)
        self._absolute = keep * self._absolute + abs(outcome - forecast.median)
        self._outcome = keep * self._outcome + outcome

    @property
    def relative(self) -> float:
        """Mean error of the forecasts (Forecast.error) as a share of the mean outcome; 0 before there was one."""
        return self._error / self._outcome if self._outcome else 0.0

    @property
    def relative_of_median(self) -> float:
        """Mean distance from the median to the outcome as a share of the mean outcome; 0 before there was one."""
        return self._absolute / self._outcome if self._outcome else 0.0
