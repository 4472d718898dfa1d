"""Forecasts of one series for one horizon: makes one every second, learns when its time is over. Knows the experts' rates only.

Errors are taken of square roots: the spread of a count grows with the root of its mean, of which the spread is then the same for
all loads (Bartlett, 1936). It also lets a forecast be wrong by much upward and by little downward, as bursts are.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.forecast.errors import ForecastErrors
from scheduler_svc.core.forecast.experts import Expert
from scheduler_svc.core.forecast.forecast import LEVELS, MEDIAN, NOTHING, Forecast
from scheduler_svc.core.forecast.mixture import Mixture
from scheduler_svc.core.forecast.spread import Spread

_CENTRAL_SHARES = tuple(2 * level - 1 for level in LEVELS[MEDIAN + 1 :])


@dataclass(frozen=True, slots=True)
class _Made:
    """A forecast whose time is not over."""

    total_before: float
    roots: Sequence[float]
    root: float
    forecast: Forecast


class HorizonForecast:
    """See the module's first lines.

    Attributes:
        newest: of the next horizon_s seconds.
        errors: of those whose time is over.

    Args:
        horizon_s: at least 1.
        experts: fed by whoever has them.
    """

    def __init__(self, horizon_s: int, experts: Sequence[Expert]):
        self.horizon_s = horizon_s
        self.newest = Forecast(horizon_s, NOTHING)
        self.errors = ForecastErrors()
        self._experts = experts
        self._mixture = Mixture(len(experts), overlap=horizon_s)
        self._spread = Spread()
        self._made: deque[_Made] = deque()

    def advance(self, total: float) -> None:
        """A second is over, the experts know.

        Args:
            total: of all counts so far.
        """
        if len(self._made) == self.horizon_s:
            self._learn(self._made.popleft(), total)
        self._made.append(self._make(total))
        self.newest = self._made[-1].forecast

    def _learn(self, made: _Made, total: float) -> None:
        outcome = total - made.total_before
        root = math.sqrt(outcome)
        self._mixture.learn([root - other for other in made.roots])
        self._spread.learn(root - made.root)
        self.errors.learn(made.forecast, outcome)

    def _make(self, total: float) -> _Made:
        horizon_s = self.horizon_s
        roots = [math.sqrt(expert.rate(horizon_s) * horizon_s) for expert in self._experts]
        root = sum(weight * other for weight, other in zip(self._mixture.weights(), roots, strict=True))
        sizes = self._spread.sizes(_CENTRAL_SHARES)
        offsets = (*(-size for size in reversed(sizes)), 0.0, *sizes)
        quantiles = tuple(max(0.0, root + offset) ** 2 for offset in offsets)
        return _Made(total, roots, root, Forecast(horizon_s, quantiles))
