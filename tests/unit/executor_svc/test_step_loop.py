"""The worker's main loop at its pipe, with a tiny model: order, run-ahead, sessions and nonsense."""

import dataclasses
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.frames import Frame, FrameKind, FramePipe
from common.token_ids import pack_token_ids
from executor_svc.engine import Engine
from executor_svc.inbox import Inbox
from executor_svc.step_loop import StepLoop
from octavo.executor.v1 import executor_service_pb2 as pb
from tests.unit.executor_svc.cuda.host_queue import HostQueue, queued
from tests.unit.executor_svc.memory_store import MemoryStore
from tests.unit.executor_svc.tiny_engine import make_engine

GREEDY = pb.SequenceSampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0)


class FakeFront:
    """The front's end of the pipe."""

    def __init__(self, connection: socket.socket):
        self._pipe = FramePipe(connection)
        self._frames: list[Frame] = []

    def send(self, kind: FrameKind, session: int, message: pb.RunSessionRequest | None = None) -> None:
        self._pipe.send(Frame(kind, session, message.SerializeToString() if message else b""))

    def plan(self, session: int, plan: pb.StepPlan) -> None:
        self.send(FrameKind.COMMAND, session, pb.RunSessionRequest(plan=plan))

    def receive(self) -> Frame:
        while not self._frames:
            frames = self._pipe.receive(wait=True)
            assert frames is not None, "the worker closed the pipe"
            self._frames += frames
        return self._frames.pop(0)

    def event(self) -> pb.RunSessionResponse:
        frame = self.receive()
        assert frame.kind == FrameKind.EVENT
        return pb.RunSessionResponse.FromString(frame.payload)


@pytest.fixture(scope="module", params=["sync", "queued"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Steps that are over when they return, and steps whose results come on a thread of their own."""
    engine = make_engine(tmp_path_factory.mktemp("model"))
    return queued(engine, HostQueue()) if request.param == "queued" else engine


@pytest.fixture
def front(engine: Engine) -> Iterator[FakeFront]:
    ours, theirs = socket.socketpair()
    engine.runner.reset()
    loop = threading.Thread(target=StepLoop(Inbox(FramePipe(theirs)), engine).run)
    loop.start()
    with theirs:
        with ours:
            yield FakeFront(ours)
        loop.join(10)
        assert not loop.is_alive(), "the loop outlives its front"


def prompt_plan(token_ids: list[int], *, seq_id: int = 1, step_id: int = 1) -> pb.StepPlan:
    new = pb.NewSequence(
        seq_id=seq_id,
        token_ids=pack_token_ids(token_ids),
        num_prompt_tokens=len(token_ids),
        block_ids=[0, 1, 2, 3],
        sampling=GREEDY,
    )
    return pb.StepPlan(step_id=step_id, new_sequences=[new], chunks=[pb.Chunk(seq_id=seq_id, num_tokens=len(token_ids))])


def decode_plan(step_id: int) -> pb.StepPlan:
    return pb.StepPlan(step_id=step_id, chunks=[pb.Chunk(seq_id=1, num_tokens=1)])


def test_plans_that_wait_are_carried_out_one_after_the_other(front: FakeFront) -> None:
    front.send(FrameKind.OPEN, 1)
    front.plan(1, prompt_plan([4, 5, 6]))
    for step_id in range(2, 6):
        front.plan(1, decode_plan(step_id))

    assert front.receive() == Frame(FrameKind.OPENED, 1)
    results = [front.event().result for _ in range(5)]
    assert [result.step_id for result in results] == [1, 2, 3, 4, 5]
    assert all(len(result.sampled) == 1 and not result.errors for result in results)
    assert [result.timings.num_tokens for result in results] == [3, 1, 1, 1, 1]


def test_a_new_session_starts_from_nothing(front: FakeFront) -> None:
    front.send(FrameKind.OPEN, 1)
    front.receive()
    front.plan(1, prompt_plan([4, 5, 6]))
    first = front.event().result.sampled[0].token_id
    front.send(FrameKind.OPEN, 2)
    front.plan(2, prompt_plan([4, 5, 6]))

    assert front.receive() == Frame(FrameKind.OPENED, 2)
    assert front.event().result.sampled[0].token_id == first


def test_commands_of_a_session_that_is_over_do_nothing(front: FakeFront) -> None:
    front.send(FrameKind.OPEN, 1)
    front.send(FrameKind.CLOSE, 1)
    front.plan(1, prompt_plan([4, 5, 6]))
    front.send(FrameKind.OPEN, 2)
    front.plan(1, prompt_plan([4, 5, 6]))
    front.plan(2, pb.StepPlan(step_id=1))

    assert [front.receive() for _ in range(2)] == [Frame(FrameKind.OPENED, 1), Frame(FrameKind.OPENED, 2)]
    assert front.event().result.step_id == 1, "of session 2: the only plan that was carried out"


def test_nonsense_fails_the_session_and_the_loop_goes_on(front: FakeFront) -> None:
    front.send(FrameKind.OPEN, 1)
    front.receive()
    front.plan(1, decode_plan(7))

    failed = front.receive()
    assert failed.kind == FrameKind.FAILED
    assert failed.payload == b"plan.step_id: 7 does not follow 0"
    front.send(FrameKind.OPEN, 2)
    assert front.receive() == Frame(FrameKind.OPENED, 2)


def test_loads_and_saves_are_answered_beside_the_steps(front: FakeFront) -> None:
    """Without a store: a load of nothing, and a save that failed."""
    front.send(FrameKind.OPEN, 1)
    front.receive()
    keys, block_ids = [b"k" * 32], [0]
    load = pb.LoadBlocks(load_id=4, keys=keys, block_ids=block_ids)
    save = pb.SaveBlocks(save_id=5, keys=keys, block_ids=block_ids)
    front.send(FrameKind.COMMAND, 1, pb.RunSessionRequest(load_blocks=load))
    front.send(FrameKind.COMMAND, 1, pb.RunSessionRequest(save_blocks=save))

    events = {event.WhichOneof("event"): event for event in (front.event(), front.event())}
    assert (events["blocks_loaded"].blocks_loaded.load_id, events["blocks_loaded"].blocks_loaded.num_loaded) == (4, 0)
    assert (events["blocks_saved"].blocks_saved.save_id, events["blocks_saved"].blocks_saved.num_failed) == (5, 1)


def test_a_lost_device_ends_the_worker(tmp_path: Path) -> None:
    """Nothing that is queued after it can work: the front sees the pipe's end, as when the process dies."""
    queue = HostQueue()
    engine = queued(make_engine(tmp_path), queue)
    ours, theirs = socket.socketpair()
    loop = threading.Thread(target=StepLoop(Inbox(FramePipe(theirs)), engine).run)
    loop.start()
    with ours, theirs:
        front = FakeFront(ours)
        front.send(FrameKind.OPEN, 1)
        assert front.receive().kind == FrameKind.OPENED
        queue.failure = RuntimeError("an illegal memory access was encountered")
        front.plan(1, prompt_plan([4, 5, 6]))
        assert FramePipe(ours).receive(wait=True) is None
        loop.join(10)
        assert not loop.is_alive()


def test_saves_behind_plans_that_will_not_run_reach_the_store_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their blocks were computed before the scheduler asked for them."""
    queue, store = HostQueue(), MemoryStore()
    engine = dataclasses.replace(queued(make_engine(tmp_path), queue), store=store)
    ours, theirs = socket.socketpair()
    front, loop = FakeFront(ours), StepLoop(Inbox(FramePipe(theirs)), engine, save_drain_s=10.0)
    save = pb.SaveBlocks(save_id=5, keys=[b"k" * 32], block_ids=[0])
    with ours, theirs, caplog.at_level(logging.INFO):
        front.send(FrameKind.OPEN, 1)
        front.plan(1, prompt_plan([4, 5, 6]))
        front.send(FrameKind.COMMAND, 1, pb.RunSessionRequest(save_blocks=save))
        front.send(FrameKind.CLOSE, 1)
        ours.shutdown(socket.SHUT_WR)
        loop.run()

    assert list(store.blocks) == [b"k" * 32]
    assert "saves at the end: 1 blocks saved, 0 dropped" in caplog.text
