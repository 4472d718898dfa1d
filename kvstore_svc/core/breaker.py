"""When a tier that fails is left alone. Pure: the time is handed in.

After some failures in a row it is off for a while; then one failure more turns it off again, one success ends it.
"""


class Breaker:
    """See the module's first lines.

    Args:
        max_failures: in a row; then it is off.
        pause_s: for so long.
    """

    def __init__(self, max_failures: int, pause_s: float):
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._num_failures = 0
        self._off_until_s: float | None = None

    def is_off(self, now_s: float) -> bool:
        """Whether to leave it alone."""
        return self._off_until_s is not None and now_s < self._off_until_s

    def failed(self, now_s: float) -> None:
        """A call failed."""
        self._num_failures += 1
        if self._num_failures >= self._max_failures:
            self._off_until_s = now_s + self._pause_s

    def succeeded(self) -> bool:
        """A call did its work; True: failures came before."""
        had_failures = self._num_failures > 0
        self._num_failures = 0
        self._off_until_s = None
        return had_failures
