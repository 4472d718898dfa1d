"""Counts of one kind, one a second, and what is expected of the seconds to come. Knows no clock: each call is a second."""

from collections.abc import Sequence

from scheduler_svc.core.forecast.experts import all_experts
from scheduler_svc.core.forecast.horizon import HorizonForecast


class CountSeries:
    """See the module's first lines.

    Attributes:
        horizons: by seconds.
    """

    def __init__(self, horizons_s: Sequence[int]):
        self._experts = all_experts()
        self._total = 0.0
        self.horizons = {horizon_s: HorizonForecast(horizon_s, self._experts) for horizon_s in horizons_s}

    def note(self, count: float) -> None:
        """A second is over."""
        self._total += count
        for expert in self._experts:
            expert.note(count)
        for horizon in self.horizons.values():
            horizon.advance(self._total)
