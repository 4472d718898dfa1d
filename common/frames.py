"""Frames between processes of one host over a stream socket. Knows lengths and kinds, not what a frame says.

    u32 number of payload bytes | u8 kind | u32 session | payload           little endian

The executor's gRPC front and its worker talk by a socket pair; a scheduler on the same host reaches the worker by a line of
its own. Bytes of gRPC messages pass through unread. The end of the stream is how either side learns that the other is gone.
"""

import asyncio
import contextlib
import enum
import socket
import struct
import threading
from dataclasses import dataclass

_HEADER = struct.Struct("<IBI")


class FrameKind(enum.IntEnum):
    """What a frame is. To the worker: SETTINGS once, then OPEN, COMMAND, CLOSE. To the front: the others.

    On a line: OPENED once, then COMMAND to the worker and EVENT from it.
    Between the scheduler's engine and a process of its public edge: to the edge SETTINGS once, EVENT, CLOSE; from the edge READY
    or REFUSED once, COMMAND.
    """

    SETTINGS = 1  # JSON of the process's settings
    OPEN = 2  # a session starts: drop everything of the one before
    COMMAND = 3  # RunSessionRequest
    CLOSE = 4  # the session is over
    READY = 5  # ExecutorInfo; the worker serves from now on. Again when the way to the store changes
    OPENED = 6  # the session's turn has come, nothing of the one before moves any more
    EVENT = 7  # RunSessionResponse
    FAILED = 8  # text: the session's last command was nonsense; it ends
    REFUSED = 9  # text: the worker cannot start
    PROGRESS = 10  # text: what start-up is doing


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of the pipe; session is 0 where no session is meant."""

    kind: FrameKind
    session: int = 0
    payload: bytes = b""

    def encode(self) -> bytes:
        """The bytes on the pipe."""
        return _HEADER.pack(len(self.payload), self.kind, self.session) + self.payload


def pop_frames(received: bytearray) -> list[Frame]:
    """Takes the whole frames off the front of what was received."""
    frames, start = [], 0
    while len(received) - start >= _HEADER.size:
        length, kind, session = _HEADER.unpack_from(received, start)
        end = start + _HEADER.size + length
        if end > len(received):
            break
        frames.append(Frame(FrameKind(kind), session, bytes(received[start + _HEADER.size : end])))
        start = end
    del received[:start]
    return frames


class FramePipe:
    """One end that reads on one thread and writes from any."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        self._write_lock = threading.Lock()
        self._received = bytearray()
        self._at_end = False

    def send(self, frame: Frame) -> None:
        """Writes a frame.

        Raises:
            ConnectionError: the front is gone.
        """
        with self._write_lock:
            self._socket.sendall(frame.encode())

    def fileno(self) -> int:
        """Of the socket, to wait for it together with others."""
        return self._socket.fileno()

    def close(self) -> None:
        """Gives the socket back, not in the middle of a frame; whoever sends later gets an OSError."""
        self.shut_down()
        with self._write_lock:
            self._socket.close()

    def shut_down(self) -> None:
        """Ends the stream in both directions; a receive that waits returns."""
        with contextlib.suppress(OSError):  # the front was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def receive(self, *, wait: bool) -> list[Frame] | None:
        """All frames that have arrived.

        Args:
            wait: for at least one.

        Returns:
            Frames in order, none at all if wait is False and nothing came; None once the front is gone and all is received.
        """
        frames = pop_frames(self._received)
        while not self._at_end:
            try:
                data = self._socket.recv(1 << 20, 0 if wait and not frames else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return frames
            except ConnectionError:
                data = b""
            self._at_end = not data
            self._received += data
            frames += pop_frames(self._received)
        return frames or None


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None once the other end is gone."""
    try:
        length, kind, session = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        return Frame(FrameKind(kind), session, await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
