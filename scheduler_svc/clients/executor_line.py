"""The short way to an executor on this host: a Unix socket to its worker, beside the gRPC session that it belongs to.

Knows frames and the session's end. Does not know what a plan means. The session's stream carries nothing while a line is
open, but its end is the end of the session and says why.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from common.errors import OctavoError, Unavailable
from common.frames import Frame, FrameKind, pop_frames
from octavo.executor.v1 import executor_service_pb2 as pb

if TYPE_CHECKING:
    from scheduler_svc.clients.executor import ExecutorLink

_OPEN_TIMEOUT_S = 2.0
_REASON_TIMEOUT_S = 5.0


class Line(asyncio.Protocol):
    """A connected line. Made by open_line.

    Attributes:
        is_lost: nothing more will come.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._frames: deque[Frame] = deque()
        self._news = asyncio.Event()
        self.is_lost = False
        self.session = 0

    def send(self, command: pb.RunSessionRequest) -> None:
        """Hands a command over; on a lost line it goes nowhere."""
        assert self._transport is not None
        self._transport.write(Frame(FrameKind.COMMAND, self.session, command.SerializeToString()).encode())

    def pop(self) -> Frame | None:
        """The next frame that has arrived, if any."""
        return self._frames.popleft() if self._frames else None

    async def wait(self) -> None:
        """Returns when a frame has arrived or wake was called since the last wait."""
        await self._news.wait()
        self._news.clear()

    def wake(self) -> None:
        """Ends a wait."""
        self._news.set()

    def close(self) -> None:
        """Ends the line."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._buffer += data
        self._frames += pop_frames(self._buffer)
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.is_lost = True
        self._news.set()


async def open_line(path: str) -> Line:
    """Connects to a worker.

    Raises:
        Unavailable: there is no way, with the reason.
    """
    if not path:
        raise Unavailable("no place for the socket of a line (--line-folder); its log says why")
    line: Line | None = None
    try:
        async with asyncio.timeout(_OPEN_TIMEOUT_S):
            _, line = await asyncio.get_running_loop().create_unix_connection(Line, path)
            while (frame := line.pop()) is None:
                if line.is_lost:
                    raise Unavailable(f"{path}: closed")
                await line.wait()
    except (OSError, TimeoutError) as error:
        if line is not None:
            line.close()
        raise Unavailable(f"{path}: {error or 'no answer'}") from error
    line.session = frame.session
    return line


class LineLink:
    """An ExecutorLink over a line.

    Args:
        stream: the session over gRPC, which stays open.
        line: of the same session.
    """

    def __init__(self, stream: "ExecutorLink", line: Line):
        self.info = stream.info
        self._stream = stream
        self._line = line

    def send(self, command: pb.RunSessionRequest) -> None:
        """See ExecutorLink."""
        self._line.send(command)

    async def events(self) -> AsyncIterator[pb.RunSessionResponse]:
        """See ExecutorLink."""
        over = asyncio.ensure_future(self._until_over())
        over.add_done_callback(lambda _: self._line.wake())
        try:
            while not over.done():
                while (frame := self._line.pop()) is not None:
                    if frame.kind is FrameKind.EVENT and frame.session == self._line.session:
                        yield pb.RunSessionResponse.FromString(frame.payload)
                if self._line.is_lost:  # the executor is gone, or stopping: the stream knows
                    await asyncio.wait([over], timeout=_REASON_TIMEOUT_S)
                    break
                await self._line.wait()
            if not over.done():
                raise Unavailable("the executor closed its line and not its session")
            over.result()
        finally:
            over.cancel()

    async def close(self) -> None:
        """See ExecutorLink."""
        self._line.close()
        await self._stream.close()

    async def _until_over(self) -> None:
        """Returns, or raises, with the session's end."""
        async for event in self._stream.events():
            raise OctavoError(f"unexpected event {event.WhichOneof('event')} beside an open line")
