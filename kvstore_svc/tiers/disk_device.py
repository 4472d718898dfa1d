"""The disk as its tier sees it: work on threads, and when to leave it alone. Knows failures and time, no block and no file."""

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from common.clock import Clock
from common.degraded import DegradedPaths
from kvstore_svc.core.circuit_breaker import CircuitBreaker
from kvstore_svc.tiers.disk_folder import reason_of
from kvstore_svc.tiers.disk_threads import DiskThreads

P = ParamSpec("P")
T = TypeVar("T")
MAX_FAILURES = 5
PAUSE_S = 10.0
_NUM_THREADS = 8


class DiskDevice:
    """See the module's first lines.

    Args:
        path: of the folder, for people.
        clock: for pauses after failures.
        degraded: counts kvstore_disk.
    """

    def __init__(self, path: Path, clock: Clock, degraded: DegradedPaths):
        self._path = path
        self._clock = clock
        self._degraded = degraded
        self._threads = DiskThreads(_NUM_THREADS)
        self._breaker = CircuitBreaker(MAX_FAILURES, PAUSE_S)
        self._reason = ""

    @property
    def is_off(self) -> bool:
        """Whether it is left alone."""
        return self._breaker.is_off(self._clock.now())

    @property
    def unavailable_reason(self) -> str:
        """Why it is left alone; empty: it is not."""
        return self._reason if self.is_off else ""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Does something on a thread; what it raises is the caller's to judge, see failed."""
        return await self._threads.run(function, *args, **kwargs)

    async def transfer(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Reads or writes a block on a thread, as the breaker's probe if one is due.

        Raises:
            OSError: it failed, and that is counted.
        """
        is_probe, is_good = self._breaker.begin_probe(self._clock.now()), False
        try:
            result = await self._threads.run(function, *args, **kwargs)
            is_good = True
        except OSError as error:
            self.failed(error)
            raise
        finally:
            if is_probe:  # who was cancelled has found out nothing good
                self._breaker.end_probe(is_good, self._clock.now())
        self._breaker.record(True, self._clock.now())
        if self._breaker.is_closed:
            self._degraded.clear("kvstore_disk")
        return result

    def failed(self, error: OSError) -> None:
        """Something did not work."""
        self._breaker.record(False, self._clock.now())
        self._reason = f"{self._path}: {reason_of(error)}"
        self._degraded.note("kvstore_disk", self._reason)

    def close(self) -> None:
        """Waits for all threads."""
        self._threads.close()
