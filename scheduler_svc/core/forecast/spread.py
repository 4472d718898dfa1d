"""How far outcomes lie from their forecasts: the quantiles of past errors, the newer the heavier. Knows no forecast.

Errors count in both directions, because a forecast that is too low for a while is as often too high later. They are kept in bins
whose widths grow in proportion, so that nothing is sorted and the oldest error costs nothing.
"""

import math

_HALF_LIFE_S = 300.0
_SMALLEST = 0.01
_GROWTH = 1.2
_NUM_BINS = 100
"""Up to 800,000: roots of token counts are in the thousands."""
_MAX_STEP_WEIGHT = 1e9


class Spread:
    """See the module's first lines."""

    def __init__(self) -> None:
        self._bins = [0.0] * _NUM_BINS
        self._total = 0.0
        self._step_weight = 1.0
        self._growth = 2.0 ** (1.0 / _HALF_LIFE_S)

    def learn(self, error: float) -> None:
        """One second's outcome is known."""
        position = 0 if abs(error) <= _SMALLEST else math.ceil(math.log(abs(error) / _SMALLEST) / math.log(_GROWTH))
        self._bins[min(position, _NUM_BINS - 1)] += self._step_weight
        self._total += self._step_weight
        self._step_weight *= self._growth  # instead of making all others lighter
        if self._step_weight > _MAX_STEP_WEIGHT:
            self._bins = [weight / self._step_weight for weight in self._bins]
            self._total /= self._step_weight
            self._step_weight = 1.0

    def sizes(self, shares: tuple[float, ...]) -> list[float]:
        """Sizes that these shares of the errors do not exceed; 0 before the first error.

        Args:
            shares: rising, in 0..1.
        """
        sizes = []
        bins, position, below = self._bins, 0, 0.0
        for share in shares:
            wanted = share * self._total
            while position < _NUM_BINS - 1 and below + bins[position] < wanted:
                below += bins[position]
                position += 1
            part = (wanted - below) / bins[position] if bins[position] else 0.0
            high = _SMALLEST * _GROWTH**position
            low = high / _GROWTH if position else 0.0
            sizes.append(low + min(1.0, part) * (high - low) if self._total else 0.0)
        return sizes
