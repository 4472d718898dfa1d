"""A streaming call that ends in time, whatever the other side does: the deadline moves as blocks come. Knows no message.

gRPC's own deadline is fixed when a call begins, and whoever waits for the next message of a stream cannot look at a clock. So a
thread beside it does.
"""

import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import grpc

from common.patience import Patience


class CallDeadline:
    """See the module's first lines. A context manager: whatever is left of the call is cancelled at its end.

    Attributes:
        was_cancelled: the time was over before the call.
    """

    def __init__(self, call: Any, patience: Patience):
        """Starts to watch.

        Args:
            call: iterable, with cancel().
            patience: with the call, from now.
        """
        self.was_cancelled = False
        self._call = call
        self._patience = patience
        self._num_blocks = 0
        self._started_s = self._last_s = time.monotonic()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="call deadline", daemon=True)

    def __enter__(self) -> "CallDeadline":
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._call.cancel()  # one that has ended does not mind
        self._watcher.join()

    def responses(self) -> Iterator[Any]:
        """The call's messages, until its end or until the time is over.

        Raises:
            grpc.RpcError: the call failed.
        """
        try:
            yield from self._call
        except grpc.RpcError:
            if not self.was_cancelled:
                raise

    def extend(self) -> float:
        """Another block has come.

        Returns:
            Seconds since the one before, or since the start.
        """
        waited_s = self.waited_s
        self._last_s += waited_s
        self._num_blocks += 1
        return waited_s

    @property
    def waited_s(self) -> float:
        """Seconds since the last block came, or since the start."""
        return time.monotonic() - self._last_s

    @property
    def is_over(self) -> bool:
        """The time is over for the next block."""
        return self._left_s() <= 0

    def _left_s(self) -> float:
        return self._started_s + self._patience.seconds(self._num_blocks) - time.monotonic()

    def _watch(self) -> None:
        while not self._ended.wait(max(0.0, self._left_s())):
            if self.is_over:
                self.was_cancelled = True
                self._call.cancel()
                return
