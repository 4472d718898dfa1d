"""octavo.executor.v1.ExecutorService: check, hand to the worker, pass its events on. Knows sessions, not what a plan does."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio

from common.degraded import DegradedPaths
from common.errors import Draining, InvalidParameter
from executor_svc.line_offer import NO_LINE, LineOffer
from executor_svc.worker_process import WorkerProcess, WorkerSession
from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.executor.v1 import executor_service_pb2_grpc

log = logging.getLogger(__name__)
SessionContext = grpc.aio.ServicerContext[pb.RunSessionRequest, pb.RunSessionResponse]
InfoContext = grpc.aio.ServicerContext[pb.GetExecutorInfoRequest, pb.GetExecutorInfoResponse]


class ExecutorServicer(executor_service_pb2_grpc.ExecutorServiceServicer):
    """Fences: only the newest session's commands reach the worker.

    Args:
        worker: that computes.
        line_folder: for the sockets of schedulers on this host; None: the system's temporary folder.
    """

    def __init__(self, worker: WorkerProcess, line_folder: Path | None = None):
        self._worker = worker
        self._line_folder = line_folder
        self._degraded = DegradedPaths()
        self._sessions: set[WorkerSession] = set()
        self._draining = False

    async def RunSession(  # noqa: N802  the proto's name
        self, request_iterator: AsyncIterator[pb.RunSessionRequest], context: SessionContext
    ) -> AsyncIterator[pb.RunSessionResponse]:
        """One scheduler's session: Ready first, then events until either side ends it."""
        self._worker.info()
        if self._draining:
            raise Draining("the executor is about to stop")
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("command") != "hello":
            raise InvalidParameter("hello", "must be the first command of a session")
        session = await self._worker.open_session()
        self._sessions.add(session)
        name = f"session {session.number} of scheduler {first.hello.scheduler_id!r} epoch {first.hello.epoch:x}"
        log.info("%s opens", name)
        pump = asyncio.create_task(_pump(request_iterator, session))
        offer = self._offer_line()
        line = _handing_over(offer, session) if offer is not None else None
        try:
            await session.wait_opened()
            yield pb.RunSessionResponse(ready=self._worker.info(), line=offer.message if offer is not None else NO_LINE)
            async for event in session.events():
                yield event
        finally:
            log.info("%s is over", name)
            pump.cancel()
            if line is not None:
                line.cancel()
            session.end()
            self._sessions.discard(session)

    async def GetExecutorInfo(  # noqa: N802  the proto's name
        self, request: pb.GetExecutorInfoRequest, context: InfoContext
    ) -> pb.GetExecutorInfoResponse:
        """What this executor serves."""
        return pb.GetExecutorInfoResponse(info=self._worker.info(), in_session=self._worker.in_session)

    def _offer_line(self) -> LineOffer | None:
        """None: there is no place for its socket, and plans travel by gRPC; the scheduler is told, and counts it."""
        try:
            return LineOffer(self._line_folder)
        except OSError as error:
            self._degraded.note("line_unavailable", f"--line-folder {self._line_folder or ''}: {error}")
            return None

    def drain(self) -> None:
        """Takes no more sessions and ends the open one; its scheduler places the requests elsewhere."""
        self._draining = True
        for session in list(self._sessions):
            session.end(Draining("the executor is about to stop"))


def _handing_over(offer: LineOffer, session: WorkerSession) -> "asyncio.Task[None]":
    """Gives the worker the scheduler's line when it connects; the socket's path lives until then, or as long as the session."""

    async def hand_over() -> None:
        session.hand_over(await offer.accept())

    task = asyncio.create_task(hand_over())
    task.add_done_callback(lambda _: offer.close())  # also of a task that is cancelled before it began
    return task


async def _pump(requests: AsyncIterator[pb.RunSessionRequest], session: WorkerSession) -> None:
    """Hands the scheduler's commands to the worker until the scheduler ends the stream."""
    try:
        async for request in requests:
            command = request.WhichOneof("command")
            if command is None or command == "hello":
                session.end(InvalidParameter("command", f"{command} is not expected within a session"))
                return
            await session.send(request)
    finally:
        session.end()
