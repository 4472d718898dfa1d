"""octavo.executor.v1.ExecutorService: check, hand to the worker, pass its events on. Knows sessions, not what a plan does."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc.aio

from common.errors import Draining, InvalidParameter
from executor_svc.worker_process import WorkerProcess, WorkerSession
from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.executor.v1 import executor_service_pb2_grpc

log = logging.getLogger(__name__)
SessionContext = grpc.aio.ServicerContext[pb.RunSessionRequest, pb.RunSessionResponse]
InfoContext = grpc.aio.ServicerContext[pb.GetExecutorInfoRequest, pb.GetExecutorInfoResponse]


class ExecutorServicer(executor_service_pb2_grpc.ExecutorServiceServicer):
    """Fences: only the newest session's commands reach the worker."""

    def __init__(self, worker: WorkerProcess):
        self._worker = worker
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
        try:
            await session.wait_opened()
            yield pb.RunSessionResponse(ready=self._worker.info())
            async for event in session.events():
                yield event
        finally:
            log.info("%s is over", name)
            pump.cancel()
            session.end()
            self._sessions.discard(session)

    async def GetExecutorInfo(  # noqa: N802  the proto's name
        self, request: pb.GetExecutorInfoRequest, context: InfoContext
    ) -> pb.GetExecutorInfoResponse:
        """What this executor serves."""
        return pb.GetExecutorInfoResponse(info=self._worker.info(), in_session=self._worker.in_session)

    def drain(self) -> None:
        """Takes no more sessions and ends the open one; its scheduler places the requests elsewhere."""
        self._draining = True
        for session in list(self._sessions):
            session.end(Draining("the executor is about to stop"))


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
