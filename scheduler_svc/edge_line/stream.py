"""One end of a line, in an event loop: frames out, frames in. Knows when the other end reads too slowly; not what frames say."""

import asyncio
import socket
from collections.abc import Callable

from common.frames import Frame, pop_frames

_FULL_BYTES = 256 << 10


class FrameStream(asyncio.Protocol):
    """See the module's first line. Made by open_stream.

    Attributes:
        is_full: so much is unread at the other end that nothing should be added; send takes more all the same.
        is_lost: the other end is gone.
        on_frame: called with each frame that arrives.
        on_full: called when is_full has become True.
        on_room: called when is_full has become False.
        on_lost: called once, when the other end is gone.
    """

    def __init__(self) -> None:
        self.is_full = False
        self.is_lost = False
        self.on_frame: Callable[[Frame], None] = lambda frame: None
        self.on_full: Callable[[], None] = lambda: None
        self.on_room: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def send(self, frame: Frame) -> None:
        """Hands a frame over; never waits. On a lost line it goes nowhere."""
        assert self._transport is not None
        if not self.is_lost:
            self._transport.write(frame.encode())

    def close(self) -> None:
        """Ends the line once all is sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Ends the line now."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=_FULL_BYTES)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._received += data
        for frame in pop_frames(self._received):
            self.on_frame(frame)

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self.is_full = True
        self.on_full()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self.is_full = False
        self.on_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.is_lost = True
        self.on_lost()


async def open_stream(connection: socket.socket, stream: FrameStream) -> FrameStream:
    """Runs a stream over a connected socket."""
    await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=connection)
    return stream
