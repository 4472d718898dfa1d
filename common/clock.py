"""Time as a value that is handed in, so that tests and replays can stand still. The only module that reads a clock for cores."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only move forward."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()


class ManualClock:
    """A clock that a test turns by hand."""

    def __init__(self, start_s: float = 0.0):
        self._now = start_s

    def now(self) -> float:
        """Seconds since the start plus what advance added."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward."""
        self._now += seconds
