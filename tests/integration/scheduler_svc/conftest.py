"""A whole scheduler in the test's event loop, with fake executors behind real gRPC."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from octavo.scheduler.v1 import admin_service_pb2 as admin_pb
from octavo.scheduler.v1 import inference_service_pb2 as pb
from octavo.scheduler.v1.admin_service_pb2_grpc import AdminServiceStub
from octavo.scheduler.v1.inference_service_pb2_grpc import InferenceServiceStub
from octavo.scheduler.v1.model_service_pb2_grpc import ModelServiceStub
from scheduler_svc.app import App, running_app
from scheduler_svc.edge_line.processes import Launch
from scheduler_svc.edge_process import serve_edge
from scheduler_svc.settings import SchedulerSettings
from tests.integration.scheduler_svc.fake_executor import FakeExecutor, FakeExecutorProcess, fake_info
from tests.unit.scheduler_svc.text.small_tokenizers import write_model_folder

if TYPE_CHECKING:
    from octavo.scheduler.v1.admin_service_pb2_grpc import AdminServiceAsyncStub
    from octavo.scheduler.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub
    from octavo.scheduler.v1.model_service_pb2_grpc import ModelServiceAsyncStub


@dataclass
class Served:
    """A running scheduler and stubs to talk to it."""

    app: App
    executors: list[FakeExecutorProcess]
    channel: grpc.aio.Channel
    inference: "InferenceServiceAsyncStub"
    models: "ModelServiceAsyncStub"
    admin: "AdminServiceAsyncStub"

    @property
    def fake(self) -> FakeExecutor:
        return self.executors[0].executor

    async def load(self) -> admin_pb.Load:
        return (await self.admin.GetLoad(admin_pb.GetLoadRequest())).load

    def check_integrity(self) -> None:
        for driver in self.app.engine.drivers:
            if driver.scheduler is not None:
                driver.scheduler.check_integrity()


Serve = Callable[..., Any]


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model")


class EdgeTask:
    """A RunningEdge in the test's event loop: the same line, the same edge, and not the second that a process takes to start."""

    def __init__(self, connection: socket.socket):
        self._task = asyncio.create_task(serve_edge(connection))

    async def wait(self) -> int:
        return 0 if await self._task else 1

    def kill(self) -> None:
        self._task.cancel()


async def launch_task(name: str, connection: socket.socket) -> EdgeTask:
    """Instead of launch_process."""
    return EdgeTask(connection.dup())


@pytest.fixture(params=[0, 2], ids=["one process", "two edges"])
def num_edges(request: pytest.FixtureRequest) -> int:
    """The public API is the same whichever process serves it."""
    return int(request.param)


@pytest.fixture
def serve(tmp_path: Path, model_folder: Path, num_edges: int) -> Serve:
    """Starts executors and a scheduler.

    Example: async with serve(max_waiting_requests=2) as served: ...
    """

    @asynccontextmanager
    async def start(
        *,
        num_executors: int = 1,
        info: dict[str, Any] | None = None,
        with_model: bool = True,
        launch: Launch = launch_task,
        **settings: Any,
    ) -> AsyncIterator[Served]:
        async with AsyncExitStack() as stack:
            executors = []
            for index in range(num_executors):
                fake = FakeExecutor(fake_info(executor_id=f"fake-{index}", **(info or {})))
                process = FakeExecutorProcess(fake, f"unix:{tmp_path}/executor-{index}.sock")
                await process.start()
                stack.push_async_callback(process.kill)
                executors.append(process)
            chosen = {
                "listen": "127.0.0.1:0", "executors": [process.target for process in executors],
                "model": model_folder if with_model else None, "grace_s": 5.0, "edge_processes": num_edges,
            } | settings  # fmt: skip
            app = await stack.enter_async_context(running_app(SchedulerSettings(**chosen), launch=launch))
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(app.address.target))
            yield Served(
                app, executors, channel, InferenceServiceStub(channel), ModelServiceStub(channel), AdminServiceStub(channel)
            )
            assert not [complaint for process in executors for complaint in process.executor.complaints]

    return start


def tokens_request(prompt: list[int], max_tokens: int, **fields: Any) -> pb.GenerateRequest:
    """A request by token ids that wants token ids."""
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        stopping=pb.StoppingCriteria(max_tokens=max_tokens),
        output=pb.OutputOptions(return_token_ids=True),
        **fields,
    )


async def stream_tokens(served: Served, request: pb.GenerateRequest) -> list[int]:
    """All token ids of sample 0 of a streamed request."""
    found: list[int] = []
    async for response in served.inference.StreamGenerate(pb.StreamGenerateRequest(generation=request)):
        for delta in response.deltas:
            if delta.index == 0:
                found += delta.token_ids
    return found


async def until(predicate: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Lets the loop run until something holds; the test's timeout is the limit."""
    while not predicate():
        meanwhile()
        await asyncio.sleep(0.001)
