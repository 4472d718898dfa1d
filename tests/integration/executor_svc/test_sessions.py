"""The front over real gRPC with a worker that has no model: fences, ends of streams, and the worker's end."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from common.degraded import DegradedPaths
from common.errors import (
    Draining,
    ExecutorLost,
    InvalidParameter,
    ModelLoading,
    OctavoError,
    StaleEpoch,
    StartupError,
)
from common.rpc.address import Address
from common.rpc.channel import aio_channel
from common.rpc.security import ServerSecurity
from common.rpc.server import RpcServer
from common.rpc.status import from_rpc_error
from executor_svc.app import SERVICE
from executor_svc.service import ExecutorServicer
from executor_svc.settings import ExecutorSettings
from executor_svc.worker_process import WorkerProcess
from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.executor.v1 import executor_service_pb2_grpc
from scheduler_svc.clients.executor import ExecutorLink, GrpcExecutor, GrpcLink
from scheduler_svc.clients.executor_line import LineLink
from tests.integration.executor_svc.fake_worker import FATAL_STEP, INFO, MUTE_STEP, NONSENSE_STEP

FAKE_WORKER = (sys.executable, "-m", "tests.integration.executor_svc.fake_worker")


class FakeScheduler:
    """One session as a scheduler holds it."""

    def __init__(self, stub: "executor_service_pb2_grpc.ExecutorServiceAsyncStub", name: str = "fake"):
        self._call = stub.RunSession()
        self._name = name

    async def open(self) -> pb.ExecutorInfo:
        await self.send(pb.RunSessionRequest(hello=pb.Hello(scheduler_id=self._name, epoch=1)))
        return (await self.receive()).ready

    async def send(self, request: pb.RunSessionRequest) -> None:
        # A session that ended meanwhile cannot be written to; end() tells why it did.
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._call.write(request)

    async def plan(self, step_id: int) -> None:
        await self.send(pb.RunSessionRequest(plan=pb.StepPlan(step_id=step_id)))

    async def receive(self) -> pb.RunSessionResponse:
        response = await self._call.read()
        if isinstance(response, pb.RunSessionResponse):
            return response
        raise EOFError

    async def end(self) -> OctavoError | None:
        """How the stream ends when nothing more is read; None: normally."""
        try:
            response = await self._call.read()
            assert not isinstance(response, pb.RunSessionResponse), response
            if await self._call.code() == grpc.StatusCode.OK:
                return None
            raise AssertionError(await self._call.details())
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)

    async def done_writing(self) -> None:
        await self._call.done_writing()

    def cancel(self) -> None:
        self._call.cancel()


class Front:
    """A front with a fake worker behind it."""

    def __init__(self, worker: WorkerProcess, servicer: ExecutorServicer, channel: grpc.aio.Channel, address: Address):
        self.worker = worker
        self.address = address
        self.servicer = servicer
        self.stub: executor_service_pb2_grpc.ExecutorServiceAsyncStub = executor_service_pb2_grpc.ExecutorServiceStub(channel)


@asynccontextmanager
async def running_front(folder: Path, model: str = "ready", line_folder: Path | None = None) -> AsyncIterator[Front]:
    worker = await WorkerProcess.start(ExecutorSettings(model=model), FAKE_WORKER)
    server = RpcServer(Address.parse(f"unix:{folder}/front.sock"), ServerSecurity(), [SERVICE])
    servicer = ExecutorServicer(worker, line_folder)
    executor_service_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    if model == "ready":
        await worker.ready
    async with aio_channel(server.address) as channel:
        yield Front(worker, servicer, channel, server.address)
    await server.stop(0.0)
    await worker.stop(5.0)


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with running_front(tmp_path) as front:
        yield front


async def test_a_session_starts_with_ready_and_answers_plans_in_order(front: Front) -> None:
    scheduler = FakeScheduler(front.stub)

    assert await scheduler.open() == INFO
    for step_id in (1, 2, 3):
        await scheduler.plan(step_id)
    assert [(await scheduler.receive()).result.step_id for _ in range(3)] == [1, 2, 3]


async def test_a_newer_session_ends_the_older_with_stale_epoch(front: Front) -> None:
    old, new = FakeScheduler(front.stub, "old"), FakeScheduler(front.stub, "new")
    await old.open()
    await new.open()

    assert isinstance(await old.end(), StaleEpoch)
    await new.plan(1)
    assert (await new.receive()).result.sampled[0].token_id == 2, "the answer is of the second session"


async def test_results_of_an_older_session_never_reach_the_newer(front: Front) -> None:
    """The old session's plans are on their way when the new one opens."""
    old, new = FakeScheduler(front.stub, "old"), FakeScheduler(front.stub, "new")
    await old.open()
    for step_id in range(1, 40):
        await old.plan(step_id)
    await new.open()
    await new.plan(1)

    result = (await new.receive()).result
    assert (result.step_id, result.sampled[0].token_id) == (1, 2)


async def test_info_says_whether_a_session_is_open(front: Front) -> None:
    async def in_session() -> bool:
        return (await front.stub.GetExecutorInfo(pb.GetExecutorInfoRequest())).in_session

    assert not await in_session()
    scheduler = FakeScheduler(front.stub)
    await scheduler.open()
    assert await in_session()
    await scheduler.done_writing()
    assert await scheduler.end() is None
    assert not await in_session()


async def test_a_cancelled_stream_ends_its_session(front: Front) -> None:
    scheduler = FakeScheduler(front.stub)
    await scheduler.open()
    scheduler.cancel()
    async with asyncio.timeout(10):
        while front.worker.in_session:
            await asyncio.sleep(0.001)

    assert await FakeScheduler(front.stub).open() == INFO


@pytest.mark.parametrize(
    "request_", [pb.RunSessionRequest(), pb.RunSessionRequest(plan=pb.StepPlan(step_id=1))], ids=["empty", "plan"]
)
async def test_the_first_command_must_be_hello(front: Front, request_: pb.RunSessionRequest) -> None:
    scheduler = FakeScheduler(front.stub)
    await scheduler.send(request_)

    error = await scheduler.end()
    assert isinstance(error, InvalidParameter)
    assert error.field == "hello"


async def test_a_second_hello_ends_the_session(front: Front) -> None:
    scheduler = FakeScheduler(front.stub)
    await scheduler.open()
    await scheduler.send(pb.RunSessionRequest(hello=pb.Hello()))

    assert isinstance(await scheduler.end(), InvalidParameter)


async def test_a_nonsense_plan_ends_the_session_and_not_the_executor(front: Front) -> None:
    scheduler = FakeScheduler(front.stub)
    await scheduler.open()
    await scheduler.plan(NONSENSE_STEP)

    error = await scheduler.end()
    assert isinstance(error, InvalidParameter)
    assert error.field == "plan.step_id"
    assert await FakeScheduler(front.stub).open() == INFO


async def test_a_worker_that_dies_ends_the_session_with_executor_lost(front: Front) -> None:
    scheduler = FakeScheduler(front.stub)
    await scheduler.open()
    await scheduler.plan(FATAL_STEP)

    assert isinstance(await scheduler.end(), ExecutorLost)
    assert front.worker.died.is_set()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.GetExecutorInfo(pb.GetExecutorInfoRequest())
    assert isinstance(from_rpc_error(caught.value), ExecutorLost)


async def test_draining_ends_the_session_and_takes_no_other(front: Front) -> None:
    scheduler = FakeScheduler(front.stub)
    await scheduler.open()
    await scheduler.plan(MUTE_STEP)
    front.servicer.drain()

    assert isinstance(await scheduler.end(), Draining)
    late = FakeScheduler(front.stub)
    await late.send(pb.RunSessionRequest(hello=pb.Hello()))
    assert isinstance(await late.end(), Draining)


async def test_a_session_before_the_model_is_loaded_is_told_to_come_again(tmp_path: Path) -> None:
    async with running_front(tmp_path, model="loading") as front:
        scheduler = FakeScheduler(front.stub)
        await scheduler.send(pb.RunSessionRequest(hello=pb.Hello()))

        error = await scheduler.end()
        assert isinstance(error, ModelLoading)
        assert error.retry_after_s == 1.0


async def test_a_worker_that_refuses_says_why() -> None:
    worker = await WorkerProcess.start(ExecutorSettings(model="refused"), FAKE_WORKER)

    with pytest.raises(StartupError, match="model refused: it is a fake"):
        await worker.ready
    await worker.stop(5.0)


# By a line past the front


async def line_to(front: Front, degraded: DegradedPaths | None = None) -> ExecutorLink:
    executor = GrpcExecutor(front.address, degraded=degraded or DegradedPaths())
    return await executor.connect(pb.Hello(scheduler_id="line", epoch=2))


def plan(step_id: int) -> pb.RunSessionRequest:
    return pb.RunSessionRequest(plan=pb.StepPlan(step_id=step_id))


async def test_a_scheduler_on_this_host_gets_a_line_that_answers_plans_in_order(front: Front) -> None:
    link = await line_to(front)
    assert isinstance(link, LineLink) and link.info == INFO
    for step_id in (1, 2, 3):
        link.send(plan(step_id))
    events = link.events()
    assert [(await anext(events)).result.step_id for _ in range(3)] == [1, 2, 3]
    await events.aclose()  # type: ignore[attr-defined]
    await link.close()
    # The next scheduler has a line of its own.
    link = await line_to(front)
    link.send(plan(1))
    events = link.events()
    assert (await anext(events)).result.sampled[0].token_id == 2, "the answer is of the second session"
    await events.aclose()  # type: ignore[attr-defined]
    await link.close()


async def test_without_a_place_for_the_line_plans_travel_by_grpc(tmp_path: Path) -> None:
    async with running_front(tmp_path, line_folder=tmp_path / "missing") as front:
        degraded = DegradedPaths()
        link = await line_to(front, degraded)
        assert isinstance(link, GrpcLink)
        assert degraded.counts["executor_line_unavailable"] == 1
        link.send(plan(1))
        events = link.events()
        assert (await anext(events)).result.step_id == 1
        await events.aclose()  # type: ignore[attr-defined]
        await link.close()


@pytest.mark.parametrize(
    ("step_id", "error"), [(FATAL_STEP, ExecutorLost), (NONSENSE_STEP, InvalidParameter)], ids=["died", "nonsense"]
)
async def test_the_stream_says_why_a_line_ended(front: Front, step_id: int, error: type[OctavoError]) -> None:
    link = await line_to(front)
    link.send(plan(step_id))
    with pytest.raises(error):
        async for _ in link.events():
            pass
    await link.close()


async def test_a_newer_session_takes_the_line_away(front: Front) -> None:
    old = await line_to(front)
    new = await line_to(front)
    old.send(plan(1))
    with pytest.raises(StaleEpoch):
        async for _ in old.events():
            pass
    new.send(plan(1))
    events = new.events()
    assert (await anext(events)).result.sampled[0].token_id == 2
    await events.aclose()  # type: ignore[attr-defined]
    await old.close()
    await new.close()


async def test_sessions_leave_no_socket_behind(tmp_path: Path) -> None:
    """Neither those that took their line nor those that never asked for it."""
    lines = tmp_path / "lines"
    lines.mkdir()
    async with running_front(tmp_path, line_folder=lines) as front:
        link = await line_to(front)
        await link.close()
        scheduler = FakeScheduler(front.stub)
        await scheduler.open()
        assert len(list(lines.iterdir())) == 1
        await scheduler.done_writing()
        assert await scheduler.end() is None
    assert list(lines.iterdir()) == []


async def test_draining_ends_a_line(front: Front) -> None:
    link = await line_to(front)
    front.servicer.drain()
    with pytest.raises(Draining):
        async for _ in link.events():
            pass
    await link.close()
