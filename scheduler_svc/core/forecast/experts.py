"""Simple forecasts of a count per second; each is right for some loads and wrong for others. Knows nothing but the counts.

An expert takes one count after another, one a second, and says which rate it expects for the seconds to come.
"""

from typing import Protocol

_SEASON_WEIGHT = 0.25
"""Of the newest round in the mean of a bucket."""


class Expert(Protocol):
    """One way to forecast."""

    def note(self, count: float) -> None:
        """A second is over."""
        ...

    def rate(self, horizon_s: int) -> float:
        """Expected count per second during the next seconds, at least 0."""
        ...


class Level:
    """An exponentially weighted mean: what came stays. Short half-lives follow the last value, long ones the mean.

    Args:
        half_life_s: after which a count weighs half.
    """

    def __init__(self, half_life_s: float):
        self._keep = 0.5 ** (1.0 / half_life_s)
        self._sum = 0.0
        self._weight = 0.0

    def note(self, count: float) -> None:
        """A second is over."""
        self._sum = self._keep * self._sum + count
        self._weight = self._keep * self._weight + 1.0

    def rate(self, horizon_s: int) -> float:
        """The same for every horizon."""
        return self._sum / self._weight if self._weight else 0.0


class Drift:
    """What grows goes on to grow, for a while: the difference of two levels is added once more, damped.

    Args:
        fast, slow: levels that somebody else feeds.
    """

    _DAMPING = 0.5

    def __init__(self, fast: Level, slow: Level):
        self._fast = fast
        self._slow = slow

    def note(self, count: float) -> None:
        """The levels know."""

    def rate(self, horizon_s: int) -> float:
        """The same for every horizon."""
        fast, slow = self._fast.rate(horizon_s), self._slow.rate(horizon_s)
        return max(0.0, fast + self._DAMPING * (fast - slow))


class Season:
    """What came at the same time of earlier rounds: jobs at the full minute, people at nine in the morning.

    Args:
        period_s: of a round.
        bucket_s: divides it; counts within are taken together.
        otherwise: says what to expect of a time that was not seen yet; fed by somebody else.
    """

    def __init__(self, period_s: int, bucket_s: int, otherwise: Level):
        self._bucket_s = bucket_s
        self._period_s = period_s
        self._rates: list[float | None] = [None] * (period_s // bucket_s)
        self._otherwise = otherwise
        self._now_s = 0
        self._sum = 0.0

    def note(self, count: float) -> None:
        """A second is over."""
        self._sum += count
        self._now_s += 1
        if self._now_s % self._bucket_s == 0:
            bucket = (self._now_s // self._bucket_s - 1) % len(self._rates)
            rate, before = self._sum / self._bucket_s, self._rates[bucket]
            self._rates[bucket] = rate if before is None else before + _SEASON_WEIGHT * (rate - before)
            self._sum = 0.0

    def rate(self, horizon_s: int) -> float:
        """Of these seconds in earlier rounds."""
        total, at_s, end_s = 0.0, self._now_s, self._now_s + min(horizon_s, self._period_s)
        while at_s < end_s:
            until_s = min(end_s, (at_s // self._bucket_s + 1) * self._bucket_s)
            rate = self._rates[at_s // self._bucket_s % len(self._rates)]
            total += (until_s - at_s) * (self._otherwise.rate(horizon_s) if rate is None else rate)
            at_s = until_s
        return total / min(horizon_s, self._period_s)


_HALF_LIVES_S = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_DRIFTS_S = ((16, 64), (64, 256))
_SEASONS_S = ((60, 2), (300, 10), (3600, 60), (86_400, 600), (604_800, 1800))
"""Periods and their buckets: minute, five minutes, hour, day, week."""


def all_experts() -> list[Expert]:
    """New ones, of a series of which nothing is known. They are fed in this order."""
    levels = {half_life_s: Level(half_life_s) for half_life_s in _HALF_LIVES_S}
    drifts = [Drift(levels[fast], levels[slow]) for fast, slow in _DRIFTS_S]
    seasons = [Season(period_s, bucket_s, levels[256]) for period_s, bucket_s in _SEASONS_S]
    return [*levels.values(), *drifts, *seasons]
