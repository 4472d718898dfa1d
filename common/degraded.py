"""Degraded paths: what the process does worse than it should, counted and said once. Nothing is swallowed silently.

Every path has a name, for example "kvstore_unavailable". The first time, and again after it has been fine, a warning is
logged; each time it is counted in octavo_degraded_total{path}.
"""

import logging
from collections import Counter

from prometheus_client import Counter as MetricCounter

log = logging.getLogger(__name__)
_METRIC = MetricCounter("octavo_degraded", "How often a degraded path was taken", ["path"])


class DegradedPaths:
    """Counts by path since the start of the process."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._active: set[str] = set()

    def note(self, path: str, reason: str) -> None:
        """The path was taken."""
        self.counts[path] += 1
        _METRIC.labels(path).inc()
        if path not in self._active:
            self._active.add(path)
            log.warning("degraded: %s: %s (counted from now on, not logged again)", path, reason)

    def clear(self, path: str) -> None:
        """The path is not needed any more."""
        if path in self._active:
            self._active.remove(path)
            log.info("no longer degraded: %s", path)
