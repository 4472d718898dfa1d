"""The engine's end of a line: carries out what one edge process asks for, and tells it what is new. Knows the engine, no process.

Nothing here holds up the step loop: news are put together while a step's result is dealt with and go out as one message after
the next plan; while the edge does not read, they wait and grow together, and an edge that reads nothing for too long is lost.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from common.errors import OctavoError
from common.frames import Frame, FrameKind
from common.ids import RequestId
from octavo.scheduler.v1 import edge_line_pb2 as pb
from scheduler_svc.edge.engine import Administration
from scheduler_svc.edge_line import convert
from scheduler_svc.edge_line.news import PendingNews
from scheduler_svc.edge_line.remote_output import RemoteOutput
from scheduler_svc.edge_line.stream import FrameStream
from scheduler_svc.engine import Engine

log = logging.getLogger(__name__)

MAX_STALL_S = 10.0


class EdgeSession:
    """One edge process, from the engine's side.

    Args:
        engine: of this process.
        administration: answers operators.
        stream: to the edge.
        name: of the edge, for people.
        max_stall_s: an edge that has not read for so long is lost.

    Attributes:
        cpu_s: of the edge since its start, by its last report.
    """

    def __init__(
        self,
        engine: Engine,
        administration: Administration,
        stream: FrameStream,
        name: str,
        *,
        max_stall_s: float = MAX_STALL_S,
    ):
        self.cpu_s = 0.0
        self._engine = engine
        self._administration = administration
        self._stream = stream
        self._name = name
        self._max_stall_s = max_stall_s
        self._news = PendingNews()
        self._is_flush_due = False
        self._is_draining = False
        self._outputs: dict[int, RemoteOutput] = {}
        self._submissions: dict[int, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._stall: asyncio.TimerHandle | None = None
        stream.on_full = self._begin_stall
        stream.on_room = self._go_on
        self._start(self._tell_model())

    @property
    def num_open_requests(self) -> int:
        """Requests of this edge that have not ended."""
        return sum(not output.is_over for output in self._outputs.values())

    def drain(self) -> None:
        """The edge's health says NOT_SERVING from now on."""
        self._is_draining = True
        self._tell()

    def receive(self, frame: Frame) -> None:
        """Takes in what the edge says."""
        command = pb.EdgeCommand.FromString(frame.payload)
        match command.WhichOneof("command"):
            case "submit":
                self._submit(command.call_id, command.submit)
            case "abandon":
                self._abandon(command.abandon.first_sample)
            case "end_sample":
                self._end_sample(command.end_sample)
            case "fail_output":
                self._fail_output(command.fail_output)
            case "report":
                self.cpu_s = command.report.cpu_s
            case _:
                self._start(self._answer(command))

    def end(self) -> None:
        """The edge is gone: so is everybody who waits for an answer of it."""
        self._cancel_stall()
        for call in self._calls:
            call.cancel()
        for first_sample in list(self._outputs):
            self._abandon(first_sample)

    def flush(self) -> None:
        """Sends what is new, unless the edge has yet to read what was sent before."""
        self._is_flush_due = False
        if self._stream.is_full:
            return
        news = self._news.take(self._engine.num_open_requests)
        news.draining = self._is_draining
        self._stream.send(Frame(FrameKind.EVENT, payload=news.SerializeToString()))

    def _tell(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    # Requests

    def _submit(self, call_id: int, message: pb.SubmitRequest) -> None:
        output = RemoteOutput(message.first_sample, message.n, self._news, self._tell)
        self._outputs[message.first_sample] = output
        task = self._start(self._take(call_id, message, output))
        self._submissions[message.first_sample] = task

    async def _take(self, call_id: int, message: pb.SubmitRequest, output: RemoteOutput) -> None:
        answer = pb.EdgeAnswer(call_id=call_id)
        try:
            output.generation = await self._engine.submit(convert.submitted_request(message), output)
        except Exception as error:
            answer.status = convert.error_bytes(self._told(error))
            self._outputs.pop(message.first_sample, None)
        finally:
            self._submissions.pop(message.first_sample, None)
        self._news.answers.append(answer)
        self._tell()

    def _abandon(self, first_sample: int) -> None:
        """Also the edge's way to say that it has no more use for the request's number."""
        output = self._outputs.pop(first_sample, None)
        if (submission := self._submissions.pop(first_sample, None)) is not None:
            submission.cancel()
        elif output is not None and output.generation is not None:
            self._engine.abandon(output.generation)

    def _end_sample(self, message: pb.EndSample) -> None:
        output = self._outputs.get(message.first_sample)
        if output is None or output.generation is None:
            return
        seq_id = output.end_sample(message.index, message.num_tokens)
        if output.is_over or seq_id is not None:
            self._engine.note_output(output.generation, seq_id)

    def _fail_output(self, message: pb.FailOutput) -> None:
        output = self._outputs.get(message.first_sample)
        if output is not None and output.generation is not None:
            output.fail_at_edge(convert.error_of(message.status))
            self._engine.note_output(output.generation)

    # Calls

    async def _answer(self, command: pb.EdgeCommand) -> None:
        answer = pb.EdgeAnswer(call_id=command.call_id)
        try:
            match command.WhichOneof("command"):
                case "cancel":
                    answer.cancelled = await self._engine.cancel_generation(RequestId(command.cancel.request_id))
                case "served_model":
                    answer.model.CopyFrom(await self._engine.served_model())
                case "num_executors":
                    answer.num_executors = await self._engine.num_connected_executors()
                case "server_info":
                    answer.server_info.CopyFrom(await self._administration.server_info())
                case "load":
                    answer.load.CopyFrom(await self._administration.load())
                case "flush_cache":
                    flushed = await self._administration.flush_cache(include_store=command.flush_cache.include_store)
                    answer.flushed.CopyFrom(flushed)
                case "add_executor":
                    answer.added_executor.CopyFrom(await self._administration.add_executor(command.add_executor.address))
                case "remove_executor":
                    drain_s = command.remove_executor.drain.ToNanoseconds() / 1e9
                    removed = await self._administration.remove_executor(command.remove_executor.address, drain_s)
                    answer.removed_executor.CopyFrom(removed)
                case other:
                    raise OctavoError(f"an edge asks for {other}")
        except Exception as error:
            answer.status = convert.error_bytes(self._told(error))
        self._news.answers.append(answer)
        self._tell()

    def _told(self, error: Exception) -> OctavoError:
        """What a caller hears of it."""
        if isinstance(error, OctavoError):
            return error
        log.error("%s: a call failed", self._name, exc_info=error)
        return OctavoError("internal error; the server's log has the details")

    async def _tell_model(self) -> None:
        model = await self._engine.first_model()
        news = pb.EdgeNews(num_open_requests=self._engine.num_open_requests, model=model, draining=self._is_draining)
        self._stream.send(Frame(FrameKind.EVENT, payload=news.SerializeToString()))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    # An edge that does not read

    def _begin_stall(self) -> None:
        if self._stall is None:
            self._stall = asyncio.get_running_loop().call_later(self._max_stall_s, self._give_up)

    def _go_on(self) -> None:
        self._cancel_stall()
        self._tell()

    def _cancel_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _give_up(self) -> None:
        log.error("%s has read nothing for %.0f s; its requests end", self._name, self._max_stall_s)
        self._stream.abort()
