"""Several edges and one engine: what comes by one connection is known to the others, and an edge that dies dies alone."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import pytest

from common.errors import StartupError
from octavo.scheduler.v1 import inference_service_pb2 as pb
from octavo.scheduler.v1.inference_service_pb2_grpc import InferenceServiceStub
from scheduler_svc.app import running_app
from scheduler_svc.edge_line.processes import RunningEdge, launch_process
from scheduler_svc.edge_line.session import EdgeSession
from scheduler_svc.edge_wiring import SeparateEdge
from scheduler_svc.settings import SchedulerSettings
from tests.contract.errors import seen
from tests.integration.scheduler_svc.conftest import Serve, Served, launch_task, tokens_request, until
from tests.integration.scheduler_svc.fake_executor import FakeExecutor, FakeExecutorProcess, continuation, fake_info
from tests.integration.scheduler_svc.test_server import free_port

if TYPE_CHECKING:
    from octavo.scheduler.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub

PROMPT = [5, 6, 7, 8]
# Channels of one process share a connection unless they are told not to.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


@pytest.fixture
def num_edges() -> int:
    return 2


def sessions(served: Served) -> dict[str, EdgeSession]:
    assert isinstance(served.app.edge, SeparateEdge)
    return served.app.edge.processes.sessions


class Caller:
    """One connection with one running request.

    Attributes:
        edge: where the connection ended up.
    """

    def __init__(self, stub: "InferenceServiceAsyncStub", request_id: str, max_tokens: int):
        self.stub = stub
        self.request_id = request_id
        self.edge = ""
        self._max_tokens = max_tokens
        request = tokens_request(PROMPT, max_tokens, request_id=request_id)
        self._call = stub.StreamGenerate(pb.StreamGenerateRequest(generation=request))

    async def tokens(self) -> list[int]:
        return [token_id async for message in self._call for delta in message.deltas for token_id in delta.token_ids]


@asynccontextmanager
async def callers_at_both_edges(served: Served, max_tokens: int = 30) -> AsyncIterator[list[Caller]]:
    """Connections, opened until each edge has one; the executor's gate is shut before."""
    served.fake.gate.clear()
    async with AsyncExitStack() as stack:
        callers: list[Caller] = []
        while len({caller.edge for caller in callers}) < 2:
            before = {name: session.num_open_requests for name, session in sessions(served).items()}
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(served.app.address.target, OWN_CONNECTION))
            caller = Caller(InferenceServiceStub(channel), f"caller-{len(callers)}", max_tokens)
            await until(lambda: served.app.engine.num_open_requests > len(callers))
            [caller.edge] = [name for name, s in sessions(served).items() if s.num_open_requests > before[name]]
            callers.append(caller)
        yield callers


async def test_what_runs_at_one_edge_is_known_to_the_other(serve: Serve) -> None:
    async with serve() as served, callers_at_both_edges(served) as callers:
        mine, other = callers[0], next(caller for caller in callers if caller.edge != callers[0].edge)

        with pytest.raises(grpc.aio.AioRpcError) as caught:  # an id is in use at whichever edge
            await mine.stub.Generate(tokens_request(PROMPT, 3, request_id=other.request_id))
        assert seen(caught.value).reason == "REQUEST_ID_IN_USE"

        answer = await mine.stub.CancelGeneration(pb.CancelGenerationRequest(request_id=other.request_id))
        assert answer.cancelled
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other.tokens()
        assert seen(caught.value).reason == "CANCELLED_BY_REQUEST"

        session = mine.stub.GenerateSession()  # the id is free again, and a session cancels its own only
        await session.write(pb.GenerateSessionRequest(generation=tokens_request(PROMPT, 5, request_id=other.request_id)))
        await session.write(pb.GenerateSessionRequest(cancel_request_id=mine.request_id))
        await session.done_writing()
        served.fake.gate.set()
        found = [t async for message in session for delta in message.response.deltas for t in delta.token_ids]
        assert found == continuation(PROMPT, 5)
        assert await mine.tokens() == continuation(PROMPT, 30)
        await until(lambda: served.app.engine.num_open_requests == 0)
        assert all(session.num_open_requests == 0 for session in sessions(served).values())


async def test_an_edge_that_dies_takes_its_own_requests_only_and_comes_back(serve: Serve) -> None:
    launched: list[tuple[str, RunningEdge]] = []

    async def launch(name: str, connection: socket.socket) -> RunningEdge:
        launched.append((name, await launch_process(name, connection)))
        return launched[-1][1]

    async with serve(launch=launch, prefix_caching=False) as served:
        async with callers_at_both_edges(served, max_tokens=60) as callers:
            driver = served.app.engine.drivers[0]
            victims = [caller for caller in callers if caller.edge == callers[0].edge]
            others = [caller for caller in callers if caller.edge != callers[0].edge]
            await until(lambda: driver.stats().num_running_requests == len(callers), served.fake.gate.let_one_through)

            next(running for name, running in launched if name == callers[0].edge).kill()
            await until(lambda: served.app.engine.num_open_requests == len(others))

            served.check_integrity()  # its blocks are free though no step has ended since
            assert driver.stats().num_used_blocks <= len(others) * -(-(len(PROMPT) + 60) // 4)
            served.fake.gate.set()
            assert [await caller.tokens() for caller in others] == [continuation(PROMPT, 60)] * len(others)
            for victim in victims:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await victim.tokens()
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: len(launched) == 3)
        async with callers_at_both_edges(served) as callers:
            served.fake.gate.set()
            assert [await caller.tokens() for caller in callers] == [continuation(PROMPT, 30)] * len(callers)
        load = await served.load()
        assert load.degraded["edge_lost"] == 1 and load.num_cancelled_requests == len(victims)


async def test_edges_end_with_their_engine(tmp_path: Path, model_folder: Path) -> None:
    fake = FakeExecutor(fake_info())
    executor = FakeExecutorProcess(fake, f"unix:{tmp_path}/executor.sock")
    await executor.start()
    port = free_port()
    arguments = ["--listen", f"127.0.0.1:{port}", "--executors", executor.target, "--model", str(model_folder)]
    arguments += ["--edge-processes", "1"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "scheduler_svc", *arguments, env=dict(os.environ))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            fake.gate.clear()
            call = InferenceServiceStub(channel).StreamGenerate(
                pb.StreamGenerateRequest(generation=tokens_request(PROMPT, 50)), wait_for_ready=True
            )
            reading = asyncio.ensure_future(call.read())
            await until(lambda: bool(fake.plans) or reading.done(), fake.gate.let_one_through)
            process.send_signal(signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await reading
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

        def is_refused() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) != 0

        await until(is_refused)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await executor.kill()


async def test_a_unix_socket_is_served_by_one_edge(serve: Serve, tmp_path: Path) -> None:
    async with serve(listen=f"unix:{tmp_path}/scheduler.sock") as served:
        assert list(sessions(served)) == ["edge-0"]
        assert (await served.inference.Generate(tokens_request(PROMPT, 3))).usage.completion_tokens == 3


async def test_what_keeps_an_edge_from_starting_is_said(tmp_path: Path) -> None:
    settings = SchedulerSettings(listen="127.0.0.1:0", model=tmp_path / "nothing", edge_processes=2)
    with pytest.raises(StartupError, match="nothing"):
        async with running_app(settings, launch=launch_task):
            pass
