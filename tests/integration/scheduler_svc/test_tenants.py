"""Tenants, classes and deadlines, from the wire to the core."""

from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from octavo.scheduler.v1 import inference_service_pb2 as pb
from scheduler_svc.core.request import ServiceClass
from tests.contract.errors import seen
from tests.integration.scheduler_svc.conftest import Serve, Served, tokens_request, until

PROMPT = [5, 6, 7, 8]
TENANTS = """
[tenants.acme]
default_class = "interactive"
max_waiting_requests = 1
token = "secret"
[tenants.small]
tokens_per_s = 1
burst_tokens = 30
"""


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(TENANTS)
    return path


def waiting(served: Served) -> list[tuple[str, ServiceClass, int]]:
    """Tenant, class and priority of all requests."""
    generations = [g for driver in served.app.engine.drivers for g in driver.generations.values()]
    return [(g.request.tenant, g.request.service_class, g.request.priority) for g in generations]


async def test_who_calls_and_how_urgent_it_is_reaches_the_core(serve: Serve, tenants: Path) -> None:
    async with serve(tenants=tenants, token="server") as served:
        served.fake.gate.clear()
        mine = served.inference.Generate(tokens_request(PROMPT, 20), metadata=(("authorization", "Bearer secret"),))
        await until(lambda: served.app.engine.num_open_requests == 1)
        qos = pb.QosSpec(service_class=pb.SERVICE_CLASS_BATCH, priority=-7)
        gateway = (("authorization", "Bearer server"), ("octavo-tenant", "other"))
        other = served.inference.Generate(tokens_request(PROMPT, 20, qos=qos), metadata=gateway)
        await until(lambda: served.app.engine.num_open_requests == 2)
        assert waiting(served) == [("acme", ServiceClass.INTERACTIVE, 0), ("other", ServiceClass.BATCH, -7)]
        served.fake.gate.set()
        await mine
        await other
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await served.inference.Generate(tokens_request(PROMPT, 20))
        assert seen(refused.value).code is grpc.StatusCode.UNAUTHENTICATED


async def test_a_tenant_above_its_rate_hears_when_to_come_back(serve: Serve, tenants: Path) -> None:
    async with serve(tenants=tenants, token="server") as served:
        metadata = (("authorization", "Bearer server"), ("octavo-tenant", "small"))
        await served.inference.Generate(tokens_request(PROMPT, 20), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await served.inference.Generate(tokens_request(PROMPT, 20), metadata=metadata)
        error = seen(refused.value)
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
        assert error.has_retry_delay
        assert "1 tokens/s" in error.message


async def test_a_deadline_ends_a_request_that_decodes_and_one_that_waits(serve: Serve) -> None:
    async with serve(info={"max_num_seqs": 1}) as served:
        served.fake.gate.clear()
        qos = pb.QosSpec(deadline=Duration(nanos=200_000_000))
        calls = [served.inference.Generate(tokens_request(PROMPT, 50, qos=qos)) for _ in range(2)]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call
            error = seen(ended.value)
            assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
        assert served.app.engine.num_open_requests == 0
        served.fake.gate.set()
        served.check_integrity()


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
async def test_every_policy_serves(serve: Serve, policy: str) -> None:
    async with serve(policy=policy, info={"max_num_seqs": 2}) as served:
        for_classes = [pb.QosSpec(service_class=i % 4) for i in range(8)]  # type: ignore[arg-type]
        answers = [served.inference.Generate(tokens_request(PROMPT, 5, qos=qos)) for qos in for_classes]
        assert [len((await answer).outputs[0].token_ids) for answer in answers] == [5] * 8
        served.check_integrity()
