"""An event loop whose time is made up: where another loop would wait, this one moves its clock. Knows no scheduler.

What runs in it takes no time but what it says (spend). So hours of a service pass in seconds, always alike.
"""

import asyncio
import selectors
from typing import Any


class _Hasty(selectors.DefaultSelector):
    """Never waits; adds up how long it was to.

    Attributes:
        now_s: seconds so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """What is ready now; time passes if nothing is.

        Raises:
            RuntimeError: nothing will ever be.
        """
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError("the simulation stands still: everything waits and no timer runs")
        self.now_s += max(0.0, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module's first lines. Also the clock of what runs in it."""

    def __init__(self) -> None:
        self._hasty = _Hasty()
        super().__init__(self._hasty)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._hasty.now_s

    def now(self) -> float:
        """The same, see common.clock.Clock."""
        return self._hasty.now_s

    def spend(self, seconds: float) -> None:
        """Who is running would have taken so long: all others wait."""
        self._hasty.now_s += seconds
