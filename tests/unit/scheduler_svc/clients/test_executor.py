from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from common.degraded import DegradedPaths
from common.errors import OctavoError, StaleEpoch, Unavailable
from common.rpc.address import Address
from common.rpc.interceptors import ErrorInterceptor
from common.shm.host import host_id
from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.executor.v1 import executor_service_pb2_grpc as pb_grpc
from scheduler_svc.clients.executor import GrpcExecutor, LocalExecutor
from tests.unit.scheduler_svc.scripted_executor import ScriptedExecutor

INFO = ScriptedExecutor().info
HELLO = pb.Hello(scheduler_id="test", epoch=1)


class Servicer(pb_grpc.ExecutorServiceServicer):
    """Answers Hello in its own way, then every plan with an empty result, then fails when told to."""

    def __init__(self, *, first: pb.RunSessionResponse | None, failure: OctavoError | None = None):
        self._first = first
        self._failure = failure

    async def RunSession(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.RunSessionRequest], context: Any
    ) -> AsyncIterator[pb.RunSessionResponse]:
        async for request in request_iterator:
            if request.HasField("hello"):
                if self._first is None:
                    return
                yield self._first
            elif self._failure is not None:
                raise self._failure
            else:
                yield pb.RunSessionResponse(result=pb.StepResult(step_id=request.plan.step_id))

    async def GetExecutorInfo(self, request: pb.GetExecutorInfoRequest, context: Any) -> pb.GetExecutorInfoResponse:  # noqa: N802
        return pb.GetExecutorInfoResponse(info=INFO)


async def served(folder: Path, servicer: Servicer, degraded: DegradedPaths | None = None) -> tuple[grpc.aio.Server, GrpcExecutor]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    pb_grpc.add_ExecutorServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{folder}/executor.sock")
    await server.start()
    return server, GrpcExecutor(Address.parse(f"unix:{folder}/executor.sock"), degraded=degraded)


async def test_a_session_opens_with_what_the_executor_serves(tmp_path: Path) -> None:
    server, executor = await served(tmp_path, Servicer(first=pb.RunSessionResponse(ready=INFO)))
    link = await executor.connect(HELLO)
    assert link.info == INFO
    for step_id in (1, 2):
        link.send(pb.RunSessionRequest(plan=pb.StepPlan(step_id=step_id)))
    events = link.events()
    assert [(await anext(events)).result.step_id for _ in range(2)] == [1, 2]
    await link.close()
    await server.stop(None)


@pytest.mark.parametrize("is_here", [True, False])
async def test_without_a_way_by_the_line_the_session_goes_by_grpc(tmp_path: Path, is_here: bool) -> None:
    """Another host's line is not tried; one of this host that leads nowhere is a degraded path."""
    line = pb.LocalLine(host_id=host_id() if is_here else "another", socket_path=f"{tmp_path}/nobody")
    degraded = DegradedPaths()
    server, executor = await served(tmp_path, Servicer(first=pb.RunSessionResponse(ready=INFO, line=line)), degraded)
    link = await executor.connect(HELLO)
    assert degraded.counts["executor_line_unavailable"] == is_here
    link.send(pb.RunSessionRequest(plan=pb.StepPlan(step_id=1)))
    events = link.events()
    assert (await anext(events)).result.step_id == 1
    await link.close()
    await server.stop(None)


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        await GrpcExecutor(Address.parse(f"unix:{tmp_path}/nobody.sock")).connect(HELLO)


@pytest.mark.parametrize("first", [None, pb.RunSessionResponse(result=pb.StepResult(step_id=1))])
async def test_an_executor_that_does_not_say_ready(tmp_path: Path, first: pb.RunSessionResponse | None) -> None:
    server, executor = await served(tmp_path, Servicer(first=first))
    with pytest.raises(Unavailable, match="before it was ready"):
        await executor.connect(HELLO)
    await server.stop(None)


async def test_the_reason_of_an_end_comes_through(tmp_path: Path) -> None:
    servicer = Servicer(first=pb.RunSessionResponse(ready=INFO), failure=StaleEpoch("fenced by another scheduler"))
    server, executor = await served(tmp_path, servicer)
    link = await executor.connect(HELLO)
    link.send(pb.RunSessionRequest(plan=pb.StepPlan(step_id=1)))
    with pytest.raises(StaleEpoch, match="fenced by another"):
        await anext(link.events())
    await link.close()
    await server.stop(None)


async def test_a_function_of_this_process_is_an_executor_too() -> None:
    log: list[str] = []

    def execute(plan: pb.StepPlan) -> pb.StepResult:
        log.append(f"step {plan.step_id}")
        return pb.StepResult(step_id=plan.step_id)

    link = await LocalExecutor(INFO, execute, lambda: log.append("reset")).connect(HELLO)
    for step_id in (1, 2):
        link.send(pb.RunSessionRequest(plan=pb.StepPlan(step_id=step_id)))
    events = link.events()
    assert [(await anext(events)).result.step_id for _ in range(2)] == [1, 2]
    assert log == ["reset", "step 1", "step 2"]
    await link.close()
