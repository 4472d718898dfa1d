"""A streaming call that ends in time, whatever the other side does: the deadline moves as blocks come. Knows no message.

gRPC's own deadline is fixed when a call begins, and whoever waits for the next message of a stream can neither look at a clock
nor do anything else. So a thread beside it reads the stream.
"""

import queue
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from common.patience import Patience

_MESSAGES_AHEAD = 8


class _End:
    """The last that comes of a stream: its error, if it had one."""

    def __init__(self, error: Exception | None = None):
        self.error = error


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
        self._messages: queue.Queue[Any] = queue.Queue(_MESSAGES_AHEAD)
        self._end: _End | None = None
        self._reader = threading.Thread(target=self._read, name="call reader", daemon=True)

    def __enter__(self) -> "CallDeadline":
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._call.cancel()  # one that has ended does not mind
        while self._end is None:
            self._take(None)
        self._reader.join()

    @property
    def has_news(self) -> bool:
        """Whether the next message, or the end, is there already."""
        return self._end is not None or not self._messages.empty()

    def responses(self) -> Iterator[Any]:
        """The call's messages, until its end or until the time is over.

        Raises:
            grpc.RpcError: the call failed.
        """
        while self._end is None:
            try:
                message = self._take(max(0.0, self._left_s()))
            except queue.Empty:
                self.was_cancelled = True
                self._call.cancel()
                return
            if self._end is None:
                yield message
        if self._end.error is not None:
            raise self._end.error

    def extend(self, num_blocks: int = 1) -> float:
        """More blocks have come, all at once.

        Returns:
            Seconds since those before, or since the start.
        """
        waited_s = self.waited_s
        self._last_s += waited_s
        self._num_blocks += num_blocks
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

    def _take(self, timeout_s: float | None) -> Any:
        message = self._messages.get(timeout=timeout_s)
        if isinstance(message, _End):
            self._end = message
        return message

    def _read(self) -> None:
        """The thread."""
        end = _End()
        try:
            for message in self._call:
                self._messages.put(message)
        except Exception as error:  # grpc.RpcError; whatever it is, whoever reads is told, and does not wait for ever
            end = _End(error)
        self._messages.put(end)
