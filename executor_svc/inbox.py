"""The worker's ways in: the front's pipe and, if its scheduler is on this host, the scheduler's own line past the front.

Knows sockets, frames and whose turn it is. Does not know commands. The front decides who gets a line: it checks the
scheduler and hands the connected socket over. A line lives as long as its session.
"""

import logging
import selectors
import socket
import struct

from common.frames import Frame, FrameKind, FramePipe

log = logging.getLogger(__name__)
LINE_MESSAGE = struct.Struct("<I")
"""What the front sends beside the descriptor of a line: the number of the session that it is for."""
_SEND_TIMEOUT_S = 1
_TIMEVAL = struct.Struct("ll")


class Inbox:
    """Frames of the current session, whichever way they come; events go out by the same way.

    Args:
        pipe: to the front.
        lines: datagram socket by which the front hands lines over; None: there are none.
    """

    def __init__(self, pipe: FramePipe, lines: socket.socket | None = None):
        self._pipe = pipe
        self._lines = lines
        self._line: FramePipe | None = None
        self._session = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(pipe, selectors.EVENT_READ)
        if lines is not None:
            self._selector.register(lines, selectors.EVENT_READ)

    def begin(self, session: int) -> None:
        """A session starts: a line is taken for it alone."""
        self._close_line()
        self._session = session

    def end(self) -> None:
        """The session is over, and its line with it."""
        self.begin(0)

    def receive(self, *, wait: bool) -> list[Frame] | None:
        """All frames that have arrived, in order on each way.

        Args:
            wait: for at least one.

        Returns:
            Frames; none at all if wait is False and nothing came; None once the front is gone and all is received.

        Raises:
            ConnectionError: the front was gone when a line was handed over.
        """
        while True:
            frames: list[Frame] = []
            for key, _ in self._selector.select(None if wait else 0):
                if key.fileobj is self._lines:
                    self._take_line(self._lines)
                elif key.fileobj is self._line:
                    frames += self._from_line(self._line)
                elif key.fileobj is self._pipe:
                    received = self._pipe.receive(wait=False)
                    if received is None:
                        return frames or None
                    frames += received
            if frames or not wait:
                return frames

    def send(self, frame: Frame) -> None:
        """Sends an event of a session by the session's way. Safe from any thread.

        Raises:
            ConnectionError: the front is gone.
        """
        line = self._line
        if line is None:
            self._pipe.send(frame)
            return
        try:
            line.send(frame)
        except OSError as error:  # the scheduler is gone, or reads nothing: the front or the scheduler ends the session
            log.warning("session %d: its line is lost: %s", frame.session, error)
            line.shut_down()

    def send_front(self, frame: Frame) -> None:
        """Sends what is for the front.

        Raises:
            ConnectionError: the front is gone.
        """
        self._pipe.send(frame)

    def shut_down(self) -> None:
        """Ends the streams in both directions; a receive that waits returns."""
        self._pipe.shut_down()
        if self._line is not None:
            self._line.shut_down()

    def _take_line(self, lines: socket.socket) -> None:
        message, descriptors, _, _ = socket.recv_fds(lines, LINE_MESSAGE.size, 1)
        connection = socket.socket(fileno=descriptors[0])
        (session,) = LINE_MESSAGE.unpack(message)
        if session != self._session or self._line is not None:
            connection.close()
            return
        # A scheduler that stands still must not hold up a newer one: what it does not take within a second ends its line.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(_SEND_TIMEOUT_S, 0))
        self._line = FramePipe(connection)
        self._selector.register(self._line, selectors.EVENT_READ)
        self.send(Frame(FrameKind.OPENED, session))

    def _from_line(self, line: FramePipe) -> list[Frame]:
        """Commands; whoever sends something else, or nothing any more, has no line."""
        frames = line.receive(wait=False)
        if frames is None:
            self._selector.unregister(line)
            return []
        return [frame for frame in frames if frame.kind is FrameKind.COMMAND]

    def _close_line(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            if line in [key.fileobj for key in self._selector.get_map().values()]:
                self._selector.unregister(line)
            line.close()
