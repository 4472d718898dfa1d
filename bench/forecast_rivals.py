"""What the forecast is compared with: the last value, the mean, exponential smoothing. Numbers in, numbers out.

Of smoothing there is one for each of many half-lives. Which of them stands for it is up to who compares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from scheduler_svc.core.forecast.experts import Level

_HALF_LIVES_S = (1, 2, 3, 5, 7, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200)


@dataclass(frozen=True)
class Rival:
    """One of them, and the forecasts that it made."""

    name: str
    forecasts: Sequence[float]


def rivals(counts: Sequence[float], horizon_s: int) -> list[Rival]:
    """Forecasts of the sum of the next horizon_s counts, one after each count."""
    totals = [0.0, *accumulate(counts)]
    ends = range(1, len(totals))
    last = [totals[end] - totals[max(0, end - horizon_s)] for end in ends]
    mean = [totals[end] / end * horizon_s for end in ends]
    return [
        Rival("last", last),
        Rival("mean", mean),
        *(_smoothing(counts, horizon_s, half_life_s) for half_life_s in _HALF_LIVES_S),
    ]


def _smoothing(counts: Sequence[float], horizon_s: int, half_life_s: int) -> Rival:
    level, forecasts = Level(half_life_s), []
    for count in counts:
        level.note(count)
        forecasts.append(level.rate(horizon_s) * horizon_s)
    return Rival(f"smoothing {half_life_s} s", forecasts)
