"""The edge's end of a line: the engine and its administration as the edge sees them, in another process. Decides nothing.

Takes news in as they come and pushes them to the requests' outputs, as the engine would; what an output decides by its text,
the engine is told.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from common.clock import Clock
from common.errors import OctavoError, Unavailable
from common.frames import Frame, FrameKind
from common.ids import RequestId, SeqId
from octavo.executor.v1 import executor_service_pb2 as executor_pb
from octavo.scheduler.v1 import admin_service_pb2 as admin_pb
from octavo.scheduler.v1 import edge_line_pb2 as pb
from scheduler_svc.core.plan import SampleId, SequenceUpdate
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.edge_line import convert
from scheduler_svc.edge_line.news import sample_tokens
from scheduler_svc.edge_line.stream import FrameStream
from scheduler_svc.generation import Generation, Output

_NO_SEQUENCE = SeqId(0)


class EngineCalls:
    """Commands to the engine, and the answers to those that have one."""

    def __init__(self, stream: FrameStream):
        self._stream = stream
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[pb.EdgeAnswer]] = {}

    def tell(self, command: pb.EdgeCommand) -> None:
        """Sends a command without an answer."""
        self._stream.send(Frame(FrameKind.COMMAND, payload=command.SerializeToString()))

    async def ask(self, command: pb.EdgeCommand) -> pb.EdgeAnswer:
        """Sends a command and waits for its answer.

        Raises:
            OctavoError: what the engine raised; Unavailable when it is gone.
        """
        if self._stream.is_lost:
            raise _engine_gone()
        command.call_id = next(self._numbers)
        future: asyncio.Future[pb.EdgeAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[command.call_id] = future
        self.tell(command)
        try:
            answer = await future
        finally:
            del self._waiting[command.call_id]
        if answer.status:
            raise convert.error_of(answer.status)
        return answer

    def receive(self, answer: pb.EdgeAnswer) -> None:
        """Takes in an answer; nobody may be waiting for it any more."""
        future = self._waiting.get(answer.call_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def end(self) -> None:
        """No answer will come."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_engine_gone())


@dataclass(slots=True)
class _Sample:
    generation: Generation
    first_sample: int
    id: SampleId
    num_tokens: int = 0


class RemoteEngine:
    """An EdgeEngine (see edge/engine.py) in another process.

    Args:
        calls: to it.
        clock: the same clock as the engine's: that of the host.
        on_draining: called when the server begins to stop.

    Attributes:
        model: see EdgeEngine.
        num_open_requests: see EdgeEngine; as of the last news.
        hashes_prompts: keys of prompts are computed here, so that the engine need not.
    """

    def __init__(self, calls: EngineCalls, clock: Clock, *, on_draining: Callable[[], None]):
        self.model: executor_pb.ExecutorInfo | None = None
        self.num_open_requests = 0
        self.hashes_prompts = True
        self._calls = calls
        self._clock = clock
        self._on_draining = on_draining
        self._next_sample = 0
        self._samples: dict[int, _Sample] = {}
        # Requests that their readers have not left, by number and the other way round.
        self._generations: dict[int, Generation] = {}
        self._first_samples: dict[Generation, int] = {}

    async def served_model(self) -> executor_pb.ExecutorInfo:
        """See EdgeEngine. It stays what it is once it is known; whether anybody serves it right now, submit finds out."""
        if self.model is None:
            self.model = (await self._calls.ask(pb.EdgeCommand(served_model=pb.AskServedModel()))).model
        return self.model

    async def num_connected_executors(self) -> int:
        """See EdgeEngine."""
        return (await self._calls.ask(pb.EdgeCommand(num_executors=pb.AskNumExecutors()))).num_executors

    async def submit(self, request: Request, output: Output) -> Generation:
        """See EdgeEngine."""
        if self.hashes_prompts and self.model is not None:
            request = replace(request, prompt_keys=tuple(request.keys_of_prompt(self.model.block_size)))
        generation = Generation(request, output)
        first_sample = self._next_sample
        self._next_sample += request.n
        self._generations[first_sample], self._first_samples[generation] = generation, first_sample
        for index in range(request.n):
            self._samples[first_sample + index] = _Sample(
                generation, first_sample, SampleId(generation.request.request_id, _NO_SEQUENCE, index)
            )
        try:
            await self._calls.ask(pb.EdgeCommand(submit=convert.submit_message(first_sample, request)))
        except BaseException:
            self.abandon(generation)
            raise
        return generation

    def abandon(self, generation: Generation) -> None:
        """See EdgeEngine."""
        first_sample = self._first_samples.pop(generation, None)
        if first_sample is None:
            return
        del self._generations[first_sample]
        for index in range(generation.request.n):
            self._samples.pop(first_sample + index, None)
        self._calls.tell(pb.EdgeCommand(abandon=pb.AbandonRequest(first_sample=first_sample)))

    async def cancel_generation(self, request_id: RequestId) -> bool:
        """See EdgeEngine."""
        return (await self._calls.ask(pb.EdgeCommand(cancel=pb.CancelRequest(request_id=request_id)))).cancelled

    # News

    def receive(self, frame: Frame) -> None:
        """Takes in a message of the engine."""
        news = pb.EdgeNews.FromString(frame.payload)
        self.num_open_requests = news.num_open_requests
        if news.HasField("model"):
            self.model = news.model
        for start in news.starts:
            if (generation := self._generations.get(start.first_sample)) is not None:
                generation.admitted_at_s, generation.first_token_at_s = start.admitted_at_s, start.first_token_at_s
                generation.cached_tokens_by_tier = dict(start.cached_tokens_by_tier)
        for number, token_id in sample_tokens(news):
            if (sample := self._samples.get(number)) is not None:
                sample.num_tokens += 1
                if sample.generation.output.push_token(sample.id, token_id):
                    self._note_end(number, sample, is_known=False)
        for update in news.updates:
            self._update(update)
        for failure in news.failures:
            if (generation := self._generations.get(failure.first_sample)) is not None:
                self._fail(generation, convert.error_of(failure.status))
        for answer in news.answers:
            self._calls.receive(answer)
        if news.draining:
            self._on_draining()

    def end(self) -> None:
        """The engine is gone: every request has failed."""
        for generation in list(self._generations.values()):
            self._fail(generation, _engine_gone())
        self._calls.end()

    def _update(self, news: pb.SampleNews) -> None:
        sample = self._samples.get(news.sample)
        if sample is None:
            return
        update = SequenceUpdate(
            sample.id.request_id,
            sample.id.seq_id,
            sample.id.index,
            tuple(news.token_ids),
            FinishReason(news.finish_reason) if news.finish_reason else None,
            news.stop_token_id if news.HasField("stop_token_id") else None,
            news.error_message,
        )
        sample.generation.output.push(update, list(news.logprobs))
        sample.num_tokens += len(update.token_ids)
        self._note_end(news.sample, sample, is_known=update.finish_reason is not None)

    def _note_end(self, number: int, sample: _Sample, *, is_known: bool) -> None:
        """Something was pushed that may have ended the sample; is_known: the engine said so."""
        output = sample.generation.output
        if output.error is not None:
            status = convert.error_bytes(output.error)
            self._calls.tell(pb.EdgeCommand(fail_output=pb.FailOutput(first_sample=sample.first_sample, status=status)))
        elif output.has_ended(sample.id.index):
            del self._samples[number]
            if not is_known:  # it ended by its text
                ended = pb.EndSample(first_sample=sample.first_sample, index=sample.id.index, num_tokens=sample.num_tokens)
                self._calls.tell(pb.EdgeCommand(end_sample=ended))
        if output.is_over:
            self._close(sample.generation)

    def _fail(self, generation: Generation, error: OctavoError) -> None:
        generation.output.fail(error)
        self._close(generation)

    def _close(self, generation: Generation) -> None:
        """Nothing more will be pushed; the number stays until its reader abandons it."""
        if generation.ended_at_s is None:
            generation.ended_at_s = self._clock.now()
        first_sample = self._first_samples.get(generation)
        if first_sample is not None:
            for index in range(generation.request.n):
                self._samples.pop(first_sample + index, None)


class RemoteAdministration:
    """An Administration (see edge/engine.py) in another process."""

    def __init__(self, calls: EngineCalls):
        self._calls = calls

    async def server_info(self) -> admin_pb.GetServerInfoResponse:
        """See Administration."""
        return (await self._calls.ask(pb.EdgeCommand(server_info=admin_pb.GetServerInfoRequest()))).server_info

    async def load(self) -> admin_pb.GetLoadResponse:
        """See Administration."""
        return (await self._calls.ask(pb.EdgeCommand(load=admin_pb.GetLoadRequest()))).load

    async def flush_cache(self, *, include_store: bool) -> admin_pb.FlushCacheResponse:
        """See Administration."""
        command = pb.EdgeCommand(flush_cache=admin_pb.FlushCacheRequest(include_store=include_store))
        return (await self._calls.ask(command)).flushed

    async def add_executor(self, address: str) -> admin_pb.AddExecutorResponse:
        """See Administration."""
        return (await self._calls.ask(pb.EdgeCommand(add_executor=admin_pb.AddExecutorRequest(address=address)))).added_executor

    async def remove_executor(self, address: str, drain_s: float) -> admin_pb.RemoveExecutorResponse:
        """See Administration."""
        command = pb.EdgeCommand(remove_executor=admin_pb.RemoveExecutorRequest(address=address))
        command.remove_executor.drain.FromNanoseconds(int(drain_s * 1e9))
        return (await self._calls.ask(command)).removed_executor


def _engine_gone() -> Unavailable:
    return Unavailable("the engine's process is gone")
