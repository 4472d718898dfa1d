"""How fast blocks come from one tier, learned from loads and probes. Pure: measurements are handed in.

Bad news counts more than good news: a request that trusts a tier too much waits for it in vain, one that trusts it too little
computes what it could have had, and the next probe puts that right.
"""

from dataclasses import dataclass

_WEIGHT_WORSE = 0.5
_WEIGHT_BETTER = 0.25


@dataclass(slots=True)
class TierSpeed:
    """One tier as one executor sees it. Unknown until the first measurement.

    Attributes:
        first_s: time to the first block of a run; None: unknown.
        block_s: time to each block behind it; None: unknown.
    """

    first_s: float | None = None
    block_s: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self.first_s is not None

    def note(self, num_blocks: int, first_s: float, seconds: float) -> None:
        """Blocks came.

        Args:
            num_blocks: how many; 0: none came in the time.
            first_s: time to the first of them.
            seconds: time to the last of them, or to the end of the wait for another one.
        """
        if num_blocks == 0:  # a wait that was cut says that it takes longer, not how long
            self.first_s = max(self.first_s or 0.0, seconds)
            return
        self.first_s = _average(self.first_s, first_s)
        if num_blocks > 1:
            self.block_s = _average(self.block_s, (seconds - first_s) / (num_blocks - 1))

    def seconds(self, num_blocks: int) -> float:
        """Expected time to the last of so many blocks; 0 of an unknown tier, so that it is tried."""
        if num_blocks == 0 or self.first_s is None:
            return 0.0
        return self.first_s + (num_blocks - 1) * (self.first_s if self.block_s is None else self.block_s)


def _average(old: float | None, new: float) -> float:
    if old is None:
        return new
    return old + (_WEIGHT_WORSE if new > old else _WEIGHT_BETTER) * (new - old)
