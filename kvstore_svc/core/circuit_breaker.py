"""When to leave a failing server or disk alone. Pure: the time is handed in.

Closed: work goes through. After max_failures failures in a row it opens: no work for off_s. Then one probe, and no second
one before the first has ended: a success closes it, a failure opens it for off_s again.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class CircuitBreaker:
    """See the module's first lines.

    Args:
        max_failures: failures in a row that open it; at least 1.
        off_s: how long it stays open before a probe.
    """

    max_failures: int
    off_s: float
    _num_failures: int = 0
    _open_until_s: float | None = None
    _is_probing: bool = False

    @property
    def is_closed(self) -> bool:
        """Whether work goes through."""
        return self._open_until_s is None

    def is_off(self, now: float) -> bool:
        """Whether nothing goes through at the moment, not even a probe."""
        return self._open_until_s is not None and (self._is_probing or now < self._open_until_s)

    def record(self, success: bool, now: float) -> None:
        """How work ended. Of work that began before the breaker opened, nothing is learned."""
        if self._open_until_s is not None:
            return
        self._num_failures = 0 if success else self._num_failures + 1
        if self._num_failures >= self.max_failures:
            self._open_until_s = now + self.off_s

    def begin_probe(self, now: float) -> bool:
        """Whether the caller shall try once now; if so, it must call end_probe."""
        if self._open_until_s is None or self._is_probing or now < self._open_until_s:
            return False
        self._is_probing = True
        return True

    def end_probe(self, success: bool, now: float) -> None:
        """How the probe ended.

        Raises:
            ValueError: none has begun.
        """
        if not self._is_probing:
            raise ValueError("no probe has begun")
        self._is_probing = False
        self._num_failures = 0
        self._open_until_s = None if success else now + self.off_s
