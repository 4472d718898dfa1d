"""GenerateSession: many requests on one stream, each a task; errors of one go in band. Knows no validation and no policy."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

from common.errors import Cancelled, DuplicateRequest, InvalidParameter, OctavoError
from octavo.scheduler.v1 import inference_service_pb2 as pb
from scheduler_svc.edge import answers
from scheduler_svc.edge.engine import EdgeEngine
from scheduler_svc.edge.output import RequestOutput
from scheduler_svc.generation import Generation

log = logging.getLogger(__name__)

_MAX_REQUESTS = 1024


class Source(Protocol):
    """Starts requests and turns their output into messages; see InferenceServicer."""

    async def start(self, message: pb.GenerateRequest, tenant: str, *, is_streamed: bool) -> tuple[Generation, RequestOutput]:
        """Queues a request."""
        ...

    def messages(
        self, generation: Generation, output: RequestOutput, message: pb.GenerateRequest
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        """Its answer as it comes."""
        ...


class Session:
    """The requests of one GenerateSession stream, which are one tenant's."""

    def __init__(self, source: Source, engine: EdgeEngine, tenant: str = ""):
        self._tenant = tenant
        self._source = source
        self._engine = engine
        # One place: a request whose message cannot be sent merges its news meanwhile.
        self._responses: asyncio.Queue[pb.GenerateSessionResponse | None] = asyncio.Queue(1)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()

    async def run(self, commands: AsyncIterator[pb.GenerateSessionRequest]) -> AsyncIterator[pb.GenerateSessionResponse]:
        """Answers until the client has said everything and every request has ended."""
        reader = asyncio.create_task(self._read(commands))
        try:
            while (response := await self._responses.get()) is not None:
                yield response
            await reader
        finally:
            reader.cancel()
            self.cancel_all()

    def cancel_all(self) -> None:
        """The stream is over."""
        for task in self._tasks.values():
            task.cancel()

    async def _read(self, commands: AsyncIterator[pb.GenerateSessionRequest]) -> None:
        try:
            async for command in commands:
                await self._obey(command)
            if self._tasks:
                await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        finally:
            await self._responses.put(None)

    async def _obey(self, command: pb.GenerateSessionRequest) -> None:
        match command.WhichOneof("command"):
            case "generation":
                message = command.generation
                error: OctavoError | None = None
                if not message.request_id:
                    error = InvalidParameter("generation.request_id", "is empty, a session's requests need one")
                elif message.request_id in self._tasks:
                    error = DuplicateRequest(f"request_id: {message.request_id[:128]!r} is in use in this session")
                elif len(self._tasks) >= _MAX_REQUESTS:
                    error = InvalidParameter("generation", f"at most {_MAX_REQUESTS} requests run in a session")
                if error is not None:
                    await self._fail(message.request_id, error)
                    return
                task = asyncio.create_task(self._generate(message))
                self._tasks[message.request_id] = task
                task.add_done_callback(lambda _: self._forget(message.request_id))
            case "cancel_request_id":
                if (running := self._tasks.get(command.cancel_request_id)) is not None:
                    self._cancelled.add(command.cancel_request_id)
                    running.cancel()
            case _:
                await self._fail("", InvalidParameter("command", "exactly one of generation and cancel_request_id must be set"))

    async def _generate(self, message: pb.GenerateRequest) -> None:
        try:
            generation, output = await self._source.start(message, self._tenant, is_streamed=True)
            try:
                async for response in self._source.messages(generation, output, message):
                    await self._responses.put(pb.GenerateSessionResponse(response=response))
            finally:
                self._engine.abandon(generation)
        except asyncio.CancelledError:
            if message.request_id not in self._cancelled:
                raise
            await self._fail(message.request_id, Cancelled("cancelled by its session"))
        except OctavoError as error:
            await self._fail(message.request_id, error)
        except Exception:
            log.exception("a request of a session failed")
            await self._fail(message.request_id, OctavoError("internal error; the server's log has the details"))

    def _forget(self, request_id: str) -> None:
        del self._tasks[request_id]
        self._cancelled.discard(request_id)

    async def _fail(self, request_id: str, error: OctavoError) -> None:
        failed = answers.request_error(request_id, error)
        await self._responses.put(pb.GenerateSessionResponse(error=failed))
