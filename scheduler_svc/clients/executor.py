"""The line to one executor: commands go out, events come in. Knows the session's opening; not what a plan means.

The engine sees ExecutorConnector and ExecutorLink only. GrpcExecutor talks to an executor_svc, over gRPC and past it where both
are on one host (executor_line.py); LocalExecutor runs a function in a thread of this process, so that a benchmark can measure
the engine without the wire.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import grpc
import grpc.aio

from common.degraded import DegradedPaths
from common.errors import Unavailable
from common.rpc.address import Address
from common.rpc.channel import ChannelSecurity, aio_channel
from common.rpc.status import from_rpc_error
from common.shm.host import host_id
from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.executor.v1 import executor_service_pb2_grpc as pb_grpc
from scheduler_svc.clients.executor_line import LineLink, open_line

_CONNECT_TIMEOUT_S = 10.0


class ExecutorLink(Protocol):
    """One open session.

    Attributes:
        info: what the executor said when the session opened.
    """

    info: pb.ExecutorInfo

    def send(self, command: pb.RunSessionRequest) -> None:
        """Hands a command over; never waits."""
        ...

    def events(self) -> AsyncIterator[pb.RunSessionResponse]:
        """What the executor says after Ready. The end, or an OctavoError, is the end of the session."""
        ...

    async def close(self) -> None:
        """Ends the session."""
        ...


class ExecutorConnector(Protocol):
    """Opens sessions with one executor.

    Attributes:
        address: for people.
    """

    address: str

    async def connect(self, hello: pb.Hello) -> ExecutorLink:
        """Opens a session.

        Raises:
            OctavoError: the executor cannot be reached now, or refuses.
        """
        ...


class GrpcExecutor:
    """An executor_svc process.

    Args:
        address: of its gRPC server.
        security: what it asks for.
        degraded: notes when a line on this host cannot be used; None: no line is tried.
    """

    def __init__(self, address: Address, security: ChannelSecurity | None = None, degraded: DegradedPaths | None = None):
        self.address = address.target
        self._address = address
        self._security = security
        self._degraded = degraded

    async def connect(self, hello: pb.Hello) -> ExecutorLink:
        """See ExecutorConnector."""
        channel = aio_channel(self._address, self._security)
        try:
            metadata = self._security.metadata() if self._security else ()
            call = pb_grpc.ExecutorServiceStub(channel).RunSession(metadata=metadata)
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await call.write(pb.RunSessionRequest(hello=hello))
                first = await call.read()
            if not isinstance(first, pb.RunSessionResponse) or first.WhichOneof("event") != "ready":
                raise Unavailable(f"executor {self.address}: closed the session before it was ready")
        except BaseException as error:
            await channel.close()
            match error:
                case grpc.aio.AioRpcError():
                    raise from_rpc_error(error) from error
                case TimeoutError() | asyncio.InvalidStateError():
                    raise Unavailable(f"executor {self.address}: no answer within {_CONNECT_TIMEOUT_S:.0f} s") from error
                case _:
                    raise
        return await self._with_line(GrpcLink(channel, call, first.ready), first.line)

    async def _with_line(self, link: "GrpcLink", offer: pb.LocalLine) -> ExecutorLink:
        """The same session by a line, if one is offered on this host and can be used."""
        if self._degraded is None or offer.host_id != host_id():
            return link
        try:
            line = await open_line(offer.socket_path)
        except Unavailable as error:
            self._degraded.note("executor_line_unavailable", f"executor {self.address}: {error.message}")
            return link
        except BaseException:
            await link.close()
            raise
        self._degraded.clear("executor_line_unavailable")
        return LineLink(link, line)


class GrpcLink:
    """A session over one bidirectional stream."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: "grpc.aio.StreamStreamCall[pb.RunSessionRequest, pb.RunSessionResponse]",
        info: pb.ExecutorInfo,
    ):
        self.info = info
        self._channel = channel
        self._call = call
        self._commands: asyncio.Queue[pb.RunSessionRequest] = asyncio.Queue()
        self._writer = asyncio.create_task(self._write())

    def send(self, command: pb.RunSessionRequest) -> None:
        """See ExecutorLink."""
        self._commands.put_nowait(command)

    async def _write(self) -> None:
        while True:
            command = await self._commands.get()
            try:
                await self._call.write(command)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # events() tells the end of the session and its reason

    async def events(self) -> AsyncIterator[pb.RunSessionResponse]:
        """See ExecutorLink."""
        try:
            while isinstance(event := await self._call.read(), pb.RunSessionResponse):
                yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def close(self) -> None:
        """See ExecutorLink."""
        self._writer.cancel()
        self._call.cancel()
        await self._channel.close()


class LocalExecutor:
    """A function that computes steps, in one thread of this process. Has no block store.

    Args:
        info: what it serves.
        execute: computes one step; called from one thread, in order.
        reset: forgets every sequence; called when a session opens.
    """

    def __init__(
        self,
        info: pb.ExecutorInfo,
        execute: Callable[[pb.StepPlan], pb.StepResult],
        reset: Callable[[], None] = lambda: None,
    ):
        self.address = "local"
        self._info = info
        self._execute = execute
        self._reset = reset

    async def connect(self, hello: pb.Hello) -> "LocalLink":
        """See ExecutorConnector."""
        self._reset()
        return LocalLink(self._info, self._execute)


class LocalLink:
    """A session with a LocalExecutor."""

    def __init__(self, info: pb.ExecutorInfo, execute: Callable[[pb.StepPlan], pb.StepResult]):
        self.info = info
        self._execute = execute
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local-executor")
        self._results: asyncio.Queue[asyncio.Future[pb.StepResult]] = asyncio.Queue()

    def send(self, command: pb.RunSessionRequest) -> None:
        """See ExecutorLink."""
        if command.WhichOneof("command") != "plan":
            raise ValueError("a local executor takes plans only")
        loop = asyncio.get_running_loop()
        self._results.put_nowait(loop.run_in_executor(self._thread, self._execute, command.plan))

    async def events(self) -> AsyncIterator[pb.RunSessionResponse]:
        """See ExecutorLink."""
        while True:
            future = await self._results.get()
            yield pb.RunSessionResponse(result=await future)

    async def close(self) -> None:
        """See ExecutorLink."""
        self._thread.shutdown(wait=False, cancel_futures=True)
