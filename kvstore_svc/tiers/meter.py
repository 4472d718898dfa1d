"""How fast a lower tier is and how often it fails, measured where blocks come up. Pure: times are handed in.

Bandwidth is bytes by the time in which at least one read was under way: reads overlap, and their own times would count twice.
"""

from dataclasses import dataclass

_WEIGHT = 0.1


@dataclass(slots=True)
class TierMeter:
    """Reads of one tier since the start of the store.

    Attributes:
        num_reads: reads that found their block.
        num_verify_failures: of these, those whose bytes were not the right ones; they were served to nobody.
        num_timeouts: times a reader stopped waiting for this tier's next block.
        read_bytes: of the blocks that were found.
        read_s: time with a read under way.
        latency_s: of a read, moving average.
    """

    num_reads: int = 0
    num_verify_failures: int = 0
    num_timeouts: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    latency_s: float = 0.0
    _num_reading: int = 0
    _busy_since_s: float = 0.0

    def begin(self, now_s: float) -> None:
        """A read begins."""
        if self._num_reading == 0:
            self._busy_since_s = now_s
        self._num_reading += 1

    def end(self, started_s: float, now_s: float, num_bytes: int | None) -> None:
        """A read ended, well or not.

        Args:
            started_s: when it began.
            now_s: the time.
            num_bytes: of the block that it found; None: it found none.
        """
        self._num_reading -= 1
        if self._num_reading == 0:
            self.read_s += now_s - self._busy_since_s
        if num_bytes is None:
            return
        seconds = now_s - started_s
        self.latency_s = seconds if self.num_reads == 0 else self.latency_s + _WEIGHT * (seconds - self.latency_s)
        self.num_reads += 1
        self.read_bytes += num_bytes
