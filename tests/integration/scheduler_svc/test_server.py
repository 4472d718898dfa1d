"""The server as operators meet it: health, reflection, two on one port, load, flush, drain, metrics."""

import asyncio
import os
import signal
import socket
import sys
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.errors import StartupError
from octavo.scheduler.v1 import admin_service_pb2 as admin_pb
from octavo.scheduler.v1 import inference_service_pb2 as pb
from octavo.scheduler.v1 import inference_service_pb2_grpc
from scheduler_svc.app import running_app
from scheduler_svc.service import SERVICES
from scheduler_svc.settings import SchedulerSettings
from tests.contract.errors import seen
from tests.integration.scheduler_svc.conftest import Serve, launch_task, stream_tokens, tokens_request, until
from tests.integration.scheduler_svc.fake_executor import FakeExecutor, FakeExecutorProcess, continuation, fake_info

PROMPT = [5, 6, 7, 8]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def health(channel: grpc.aio.Channel, service: str = "") -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_health_answers_for_every_service_and_says_when_it_drains(serve: Serve) -> None:
    async with serve(token="secret") as served:  # probes need no token
        for name in ("", *SERVICES):
            assert await health(served.channel, name) == health_pb2.HealthCheckResponse.SERVING
        await served.app.drain()
        assert await health(served.channel) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_reflection_knows_every_service(serve: Serve) -> None:
    async with serve() as served:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert names >= set(SERVICES)
        for name in SERVICES:
            descriptor_pool.Default().FindServiceByName(name)


async def test_a_second_server_on_the_port_is_refused(serve: Serve) -> None:
    async with serve() as served:
        for num_edges in (0, 2):
            settings = SchedulerSettings(listen=served.app.address.target, edge_processes=num_edges)
            with pytest.raises(StartupError, match="address is in use"):
                async with running_app(settings, launch=launch_task):
                    pass
        assert (await served.inference.Generate(tokens_request(PROMPT, 3))).usage.completion_tokens == 3


async def test_load_counts_what_happened(serve: Serve) -> None:
    async with serve() as served:
        await served.inference.Generate(tokens_request(PROMPT * 3, 8))
        await served.inference.Generate(tokens_request(PROMPT * 3, 8))
        load = await served.load()
        assert (load.num_finished_requests, load.num_prompt_tokens, load.num_output_tokens) == (2, 24, 16)
        assert dict(load.cached_tokens_by_tier) == {"device": load.num_cached_tokens}
        executor = load.executors[0]
        assert executor.connected and executor.num_steps > 0
        assert executor.num_free_blocks + executor.num_cached_blocks == executor.num_blocks == 64
        watched = served.admin.WatchLoad(admin_pb.WatchLoadRequest())
        assert (await watched.read()).load.num_finished_requests == 2
        watched.cancel()
        flushed = await served.admin.FlushCache(admin_pb.FlushCacheRequest())
        assert flushed.num_device_blocks == executor.num_cached_blocks
        assert (await served.load()).executors[0].num_free_blocks == 64


async def test_server_info_shows_settings_without_secrets(serve: Serve) -> None:
    async with serve(token="secret", cache_salt="salt") as served:
        metadata = (("authorization", "Bearer secret"),)
        await served.app.engine.served_model()
        info = await served.admin.GetServerInfo(admin_pb.GetServerInfoRequest(), metadata=metadata)
        assert info.executors[0].model == "models/fake" and info.executors[0].connected
        assert "secret" not in str(info) and "salt:" not in str(dict(info.settings))
        assert not info.kvstore.connected and info.kvstore.reason


async def test_a_server_beyond_this_host_needs_protection(model_folder: Path) -> None:
    with pytest.raises(StartupError, match="reachable from other hosts"):
        async with running_app(SchedulerSettings(listen="0.0.0.0:0", model=model_folder)):
            pass


async def test_metrics_are_served(serve: Serve, num_edges: int) -> None:
    port = free_port()
    async with serve(metrics_listen=f"127.0.0.1:{port}") as served:
        await served.inference.Generate(tokens_request(PROMPT, 8))

        def scrape() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
                return str(response.read().decode())

        text = await asyncio.to_thread(scrape)
        for line in (
            "octavo_requests_waiting 0.0",
            "octavo_requests_running 0.0",
            "octavo_kv_cache_usage_ratio 0.0",
            'octavo_cache_config_info{block_size="4",num_gpu_blocks="64"} 1.0',
            'octavo_requests_total{outcome="finished"} 1.0',
            'octavo_tokens_total{kind="output"} 8.0',
            "octavo_time_to_first_token_seconds_count 1.0",
            "octavo_time_per_output_token_seconds_count 1.0",
        ):
            assert line in text, line
        assert text.count("octavo_edge_requests{edge=") == num_edges


@pytest.mark.parametrize("own_edges", [0, 2])
async def test_sigterm_lets_running_requests_finish_and_exits_0(tmp_path: Path, model_folder: Path, own_edges: int) -> None:
    fake = FakeExecutor(fake_info())
    executor = FakeExecutorProcess(fake, f"unix:{tmp_path}/executor.sock")
    await executor.start()
    target = f"127.0.0.1:{free_port()}" if own_edges else f"unix:{tmp_path}/scheduler.sock"
    arguments = ["--listen", target, "--executors", executor.target, "--model", str(model_folder)]
    arguments += ["--edge-processes", str(own_edges)]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "scheduler_svc", *arguments, env=dict(os.environ))
    try:
        async with grpc.aio.insecure_channel(target) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            call = stub.StreamGenerate(pb.StreamGenerateRequest(generation=tokens_request(PROMPT, 50)), wait_for_ready=True)
            first = await call.read()
            assert isinstance(first, pb.StreamGenerateResponse)
            fake.gate.clear()
            process.send_signal(signal.SIGTERM)
            while await health(channel) == health_pb2.HealthCheckResponse.SERVING:
                pass
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(tokens_request(PROMPT, 5))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            fake.gate.set()
            found = list(first.deltas[0].token_ids)
            while isinstance(message := await call.read(), pb.StreamGenerateResponse):
                for delta in message.deltas:
                    found += delta.token_ids
            assert found == continuation(PROMPT, 50)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await executor.kill()


async def test_a_request_that_outlasts_the_grace_time_is_told_why_it_ended(serve: Serve) -> None:
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(serve(grace_s=0.05))
        async with grpc.aio.insecure_channel(served.app.address.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            served.fake.gate.clear()
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            call = stub.StreamGenerate(pb.StreamGenerateRequest(generation=tokens_request(PROMPT, 50)))
            await until(lambda: served.app.engine.num_open_requests == 1)
            await served.app.drain()
            await stack.aclose()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert (caught.value.code(), seen(caught.value).reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_many_streams_at_once_get_their_own_tokens(serve: Serve) -> None:
    async with serve(info={"max_num_seqs": 64, "num_blocks": 2000, "max_num_batched_tokens": 512}) as served:
        requests = [tokens_request([1 + i % 90, 2 + i // 90, 3], 20) for i in range(150)]
        answers = await asyncio.gather(*(stream_tokens(served, request) for request in requests))
        assert answers == [continuation(list(request.token_ids.ids), 20) for request in requests]
        await until(lambda: served.app.engine.num_open_requests == 0)
        served.check_integrity()
