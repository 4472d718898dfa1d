"""How long it takes until something comes again: a distribution learned from past gaps, the newer the heavier. Knows no what.

Bins grow in proportion, from a tenth of a second to some days. Within a bin all gaps are taken to be equally likely.
"""

import bisect
from itertools import accumulate

_SMALLEST_S = 0.1
_GROWTH = 1.2
_NUM_BINS = 80
"""Up to 2.5 days."""
_KEEP = 0.5 ** (1 / 500)
"""Five hundred gaps later a gap weighs half."""
_EDGES_S = [0.0, *(_SMALLEST_S * _GROWTH**i for i in range(_NUM_BINS))]


class Gaps:
    """See the module's first lines.

    Attributes:
        num_learned: gaps so far.
    """

    def __init__(self) -> None:
        self.num_learned = 0
        self._bins = [0.0] * _NUM_BINS
        self._below = [0.0] * (_NUM_BINS + 1)
        """Share of gaps below each edge."""

    def learn(self, gap_s: float) -> None:
        """It came again after so long."""
        self.num_learned += 1
        position = min(max(0, bisect.bisect_left(_EDGES_S, gap_s) - 1), _NUM_BINS - 1)
        self._bins = [_KEEP * weight for weight in self._bins]
        self._bins[position] += 1.0
        total = sum(self._bins)
        self._below = [0.0, *accumulate(weight / total for weight in self._bins)]

    def share_within(self, gap_s: float) -> float:
        """Of gaps, those that are not longer; 0 before the first."""
        if gap_s >= _EDGES_S[-1]:
            return self._below[-1]
        position = bisect.bisect_right(_EDGES_S, gap_s) - 1
        low_s, high_s = _EDGES_S[position], _EDGES_S[position + 1]
        low, high = self._below[position], self._below[position + 1]
        return low + (high - low) * (gap_s - low_s) / (high_s - low_s)

    def quantile_s(self, share: float) -> float:
        """The gap that this share of gaps does not exceed."""
        position = min(max(0, bisect.bisect_left(self._below, share) - 1), _NUM_BINS - 1)
        low, high = self._below[position], self._below[position + 1]
        part = min(1.0, (share - low) / (high - low)) if high > low else 0.0
        return _EDGES_S[position] + part * (_EDGES_S[position + 1] - _EDGES_S[position])
