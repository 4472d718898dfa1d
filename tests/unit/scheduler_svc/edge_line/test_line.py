"""Both ends of a line, with the engine at one and requests at the other: a remote engine behaves as the engine does."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.clock import ManualClock
from common.degraded import DegradedPaths
from common.errors import Cancelled, DuplicateRequest, ExecutorLost, InvalidParameter, OctavoError, SlowConsumer, Unavailable
from common.frames import Frame
from common.ids import RequestId
from octavo.executor.v1 import executor_service_pb2 as executor_pb
from octavo.types.v1.types_pb2 import PositionLogprobs
from scheduler_svc.administration import EngineAdministration
from scheduler_svc.clients.executor import GrpcExecutor
from scheduler_svc.core.plan import SequenceUpdate
from scheduler_svc.core.request import FinishReason
from scheduler_svc.edge_line.remote_engine import EngineCalls, RemoteAdministration, RemoteEngine
from scheduler_svc.edge_line.session import EdgeSession
from scheduler_svc.edge_line.stream import FrameStream, open_stream
from scheduler_svc.engine import Engine
from scheduler_svc.engine_config import EngineConfig
from tests.unit.scheduler_svc.scripted_executor import (
    RecordedOutput,
    ScriptedExecutor,
    ScriptedLink,
    ScriptedStore,
    make_request,
)

PROMPT = (1, 2, 3, 4, 5, 6)


class NoStore(ScriptedStore):
    """A block store that operators can ask, and that says nothing."""

    async def stats(self) -> None:
        return None

    async def clear(self) -> int:
        return 0


class FailingOutput(RecordedOutput):
    """Fails by itself at its second update, as one does whose reader is too slow."""

    def push(self, update: SequenceUpdate, logprobs: Sequence[PositionLogprobs]) -> None:
        super().push(update, logprobs)
        if len(self.updates) == 2:
            self.error = SlowConsumer("too far behind")


class Rig:
    """An engine with a scripted executor, and one edge.

    Attributes:
        frames: that arrived at the edge, in order.
    """

    def __init__(self, engine: Engine, executor: ScriptedExecutor, *, max_stall_s: float = 10.0):
        self.engine = engine
        self.executor = executor
        self.ours, self.theirs = FrameStream(), FrameStream()
        self.frames: list[Frame] = []
        self.is_draining = False
        self.max_stall_s = max_stall_s
        calls = EngineCalls(self.theirs)
        self.remote = RemoteEngine(calls, engine.clock, on_draining=self._note_draining)
        self.administration = RemoteAdministration(calls)
        self.theirs.on_frame = self._receive
        self.theirs.on_lost = self.remote.end

    async def open(self) -> None:
        ours, theirs = socket.socketpair()
        await open_stream(theirs, self.theirs)
        await open_stream(ours, self.ours)
        administration = EngineAdministration(self.engine, NoStore(), {"name": "value"}, "", GrpcExecutor)
        self.session = EdgeSession(self.engine, administration, self.ours, "edge-0", max_stall_s=self.max_stall_s)
        self.ours.on_frame = self.session.receive
        self.ours.on_lost = self.session.end
        await until(lambda: self.remote.model is not None)

    @property
    def link(self) -> ScriptedLink:
        return self.executor.links[-1]

    async def draw(self, token_id: int) -> None:
        """The executor answers the oldest plan without an answer; every chunk of it draws the token."""
        await until(lambda: len(self.link.plans) > self._num_answered)
        plan = self.link.plans[self._num_answered]
        self._num_answered += 1
        await self.link.answer(plan, token_id)

    _num_answered = 0

    def _receive(self, frame: Frame) -> None:
        self.frames.append(frame)
        self.remote.receive(frame)

    def _note_draining(self) -> None:
        self.is_draining = True


@asynccontextmanager
async def rig(
    info: Mapping[str, Any] | None = None, store: ScriptedStore | None = None, *, max_stall_s: float = 10.0
) -> AsyncIterator[Rig]:
    executor = ScriptedExecutor(**(info or {}))
    config = EngineConfig(executor_wait_s=0.01, run_ahead=1)
    engine = Engine([executor], config, ManualClock(), store or ScriptedStore(), DegradedPaths())
    await engine.start()
    made = Rig(engine, executor, max_stall_s=max_stall_s)
    await made.open()
    try:
        yield made
        await until(lambda: not engine.num_open_requests)
        for driver in engine.drivers:
            assert driver.scheduler is not None
            driver.scheduler.check_integrity()
            assert driver.stats().num_used_blocks == 0
    finally:
        made.theirs.abort()
        made.ours.abort()
        await engine.stop()


async def until(predicate: Callable[[], bool]) -> None:
    while not predicate():
        await asyncio.sleep(0)


async def test_tokens_and_what_was_cached_arrive_with_their_times() -> None:
    async with rig() as r:
        for name in ("first", "again"):
            output = RecordedOutput()
            generation = await r.remote.submit(make_request(name, PROMPT, max_tokens=3), output)
            for token_id in (7, 8, 9):
                await r.draw(token_id)
            await until(lambda: output.is_over)  # noqa: B023
            assert output.token_ids == [7, 8, 9]
            assert output.updates[-1].finish_reason is FinishReason.LENGTH
            assert generation.first_token_at_s is not None and generation.ended_at_s is not None
            r.remote.abandon(generation)
        assert generation.cached_tokens_by_tier == {"device": 4}
        await until(lambda: r.session.num_open_requests == 0)
        assert (r.engine.counters.num_finished_requests, r.engine.counters.num_output_tokens) == (2, 6)


async def test_a_step_is_one_message_however_many_requests_it_moves() -> None:
    async with rig() as r:
        outputs = [RecordedOutput() for _ in range(4)]
        await asyncio.gather(*(r.remote.submit(make_request(f"r{i}", PROMPT), output) for i, output in enumerate(outputs)))
        while not all(output.num_tokens for output in outputs):  # they came one by one
            await r.draw(7)
        r.frames.clear()
        before = [output.num_tokens for output in outputs]
        for num_steps in (1, 2, 3):
            await r.draw(8)
            await until(lambda: [output.num_tokens - num_steps for output in outputs] == before)  # noqa: B023
            assert len(r.frames) == num_steps
        assert r.remote.num_open_requests == 4
        for i in range(4):
            assert await r.remote.cancel_generation(RequestId(f"r{i}"))


async def test_a_stop_string_found_at_the_edge_ends_the_sample_at_the_engine() -> None:
    async with rig() as r:
        output = RecordedOutput(2, end_after=2)
        generation = await r.remote.submit(make_request("r", PROMPT, max_tokens=20, n=2), output)
        while not output.is_over:
            await r.draw(7)
        await until(lambda: r.engine.num_open_requests == 0)
        assert r.engine.counters.num_output_tokens == generation.output.num_tokens == 4
        assert r.engine.counters.num_finished_requests == 1


async def test_an_output_that_fails_at_the_edge_fails_at_the_engine() -> None:
    async with rig() as r:
        output = FailingOutput()
        await r.remote.submit(make_request("r", PROMPT, max_tokens=20), output)
        await until(lambda: len(r.link.plans) == 1)
        await r.draw(7)
        await r.draw(8)
        await until(lambda: r.engine.num_open_requests == 0)
        assert isinstance(output.error, SlowConsumer)
        assert r.engine.counters.num_failed_requests == 1


async def test_a_request_without_a_reader_is_forgotten_in_whatever_phase() -> None:
    store = ScriptedStore(["shm"])
    async with rig({"kv_transport": "shm"}, store) as r:
        store.may_answer.clear()
        submission = asyncio.create_task(r.remote.submit(make_request("asked", PROMPT), RecordedOutput()))
        await until(lambda: bool(store.asked))
        submission.cancel()
        await until(lambda: r.engine.num_open_requests == 0)

        store.tiers = []
        store.may_answer.set()
        generation = await r.remote.submit(make_request("queued", PROMPT), RecordedOutput())
        r.remote.abandon(generation)
        await until(lambda: r.engine.num_open_requests == 0)
        assert r.session.num_open_requests == 0


async def test_refusals_come_back_as_they_were_raised() -> None:
    async with rig() as r:
        generation = await r.remote.submit(make_request("same", PROMPT), RecordedOutput())
        with pytest.raises(DuplicateRequest) as caught:
            await r.remote.submit(make_request("same", PROMPT), RecordedOutput())
        assert caught.value.metadata == {"requestId": "same"}
        r.remote.abandon(generation)


async def test_a_failure_reaches_every_sample_even_if_the_first_has_ended() -> None:
    async with rig() as r:
        output = RecordedOutput(2)
        await r.remote.submit(make_request("r", PROMPT, max_tokens=20, n=2), output)
        await until(lambda: len(r.link.plans) == 1)
        plan = r.link.plans[0]
        errors = [executor_pb.SequenceError(seq_id=plan.chunks[0].seq_id, message="poisoned")]
        sampled = [executor_pb.SampledToken(seq_id=chunk.seq_id, token_id=7) for chunk in plan.chunks[1:]]
        result = executor_pb.StepResult(step_id=plan.step_id, sampled=sampled, errors=errors)
        await r.link.say(executor_pb.RunSessionResponse(result=result))
        await until(lambda: output.has_ended(0))
        assert output.updates[0].error_message == "poisoned"
        r.engine.cancel(RequestId("r"), Cancelled("enough"))
        await until(lambda: output.is_over)
        assert isinstance(output.error, Cancelled)


async def test_news_for_an_edge_that_does_not_read_are_put_together() -> None:
    async with rig() as r:
        output = RecordedOutput()
        await r.remote.submit(make_request("r", PROMPT, max_tokens=6), output)
        await until(lambda: len(r.link.plans) == 1)
        await r.draw(7)
        await until(lambda: output.num_tokens == 1)
        r.frames.clear()
        r.ours.pause_writing()
        for token_id in (8, 9, 10, 11, 12):
            await r.draw(token_id)  # the executor is not held up
        assert output.num_tokens == 1
        r.ours.resume_writing()
        await until(lambda: output.is_over)
        assert (output.token_ids, len(r.frames)) == ([7, 8, 9, 10, 11, 12], 1)


async def test_an_edge_that_reads_nothing_for_too_long_is_lost_and_so_are_its_requests() -> None:
    async with rig(max_stall_s=0.01) as r:
        output = RecordedOutput()
        await r.remote.submit(make_request("r", PROMPT), output)
        r.ours.pause_writing()
        await until(lambda: r.ours.is_lost)
        await until(lambda: r.engine.num_open_requests == 0)
        assert r.engine.counters.num_cancelled_requests == 1


async def test_an_engine_that_is_gone_fails_requests_and_calls() -> None:
    async with rig() as r:
        output = RecordedOutput()
        await r.remote.submit(make_request("r", PROMPT), output)
        asking = asyncio.ensure_future(r.administration.load())
        r.theirs.abort()
        await until(lambda: r.theirs.is_lost)
        assert isinstance(output.error, Unavailable) and not isinstance(output.error, ExecutorLost)
        for call in (asking, r.remote.cancel_generation(RequestId("r"))):
            with pytest.raises(OctavoError, match="engine's process is gone"):
                await call


async def test_calls_of_operators_are_answered_by_the_engine() -> None:
    async with rig() as r:
        info = await r.administration.server_info()
        assert info.settings == {"name": "value"} and info.executors[0].connected
        assert (await r.administration.load()).load.num_running_requests == 0
        assert (await r.administration.flush_cache(include_store=False)).num_device_blocks == 0
        assert await r.remote.num_connected_executors() == 1
        added = (await r.administration.add_executor("127.0.0.1:1")).executor
        assert (added.address, added.connected) == ("127.0.0.1:1", False)
        with pytest.raises(InvalidParameter):
            await r.administration.add_executor("127.0.0.1:1")
        assert (await r.administration.remove_executor("127.0.0.1:1", 0.0)).executor.leaving
        assert not await r.remote.cancel_generation(RequestId("nobody"))


async def test_an_edge_hears_that_the_server_drains() -> None:
    async with rig() as r:
        r.session.drain()
        await until(lambda: r.is_draining)
