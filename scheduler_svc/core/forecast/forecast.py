"""A forecast as what it is: not a number but how likely each number is. Plain data, and its error."""

import bisect
from dataclasses import dataclass

LEVELS = tuple(i / 20 for i in range(1, 20))
"""Of the quantiles that a forecast consists of."""
MEDIAN = len(LEVELS) // 2


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of a sum over the next seconds.

    Attributes:
        horizon_s: seconds.
        quantiles: at LEVELS, rising, at least 0.
    """

    horizon_s: int
    quantiles: tuple[float, ...]

    @property
    def median(self) -> float:
        """As often more as less comes."""
        return self.quantiles[MEDIAN]

    @property
    def mean(self) -> float:
        """What comes on average."""
        return sum(self.quantiles) / len(self.quantiles)

    def quantile(self, level: float) -> float:
        """What is not exceeded with this probability; the outermost quantiles stand for all beyond them."""
        position = bisect.bisect_left(LEVELS, level)
        if position == 0 or position == len(LEVELS):
            return self.quantiles[min(position, len(LEVELS) - 1)]
        low, high = LEVELS[position - 1], LEVELS[position]
        share = (level - low) / (high - low)
        return self.quantiles[position - 1] + share * (self.quantiles[position] - self.quantiles[position - 1])

    def times(self, factor: float) -> "Forecast":
        """Of a share, or in another unit."""
        return Forecast(self.horizon_s, tuple(factor * quantile for quantile in self.quantiles))

    def error(self, outcome: float) -> float:
        """How wrong it was: the continuous ranked probability score (Gneiting and Raftery, 2007), in the outcome's unit.

        Of a forecast that names one number only, this is the absolute error.
        """
        total = 0.0
        for level, quantile in zip(LEVELS, self.quantiles, strict=True):
            below = outcome - quantile
            total += level * below if below >= 0 else (level - 1.0) * below
        return 2.0 * total / len(LEVELS)


NOTHING = (0.0,) * len(LEVELS)
"""The quantiles when nothing is known."""
