"""The life of a server: one per address, protected where it must be, seen by health and reflection, ended without loss."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.errors import Overloaded, StartupError
from common.rpc.address import Address
from common.rpc.channel import ChannelSecurity, aio_channel
from common.rpc.security import ServerSecurity
from common.rpc.server import RpcServer
from common.rpc.status import from_rpc_error
from tests.unit.common.rpc.certificate import write_certificate
from tests.unit.common.rpc.echo import SERVICE, Echo, call_kind, serving

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "unix:{folder}/s.sock"])
async def test_a_second_server_on_the_address_is_refused_and_the_first_goes_on(listen: str, tmp_path: Path) -> None:
    async with serving(Echo(), listen.format(folder=tmp_path)) as server, aio_channel(server.address) as channel:
        second = RpcServer(server.address, ServerSecurity(), [SERVICE])
        with pytest.raises(StartupError, match="cannot listen on"):
            await second.start()
        await second.stop(0)

        assert await call_kind(channel, "Unary", b"still here") == [b"still here"]


async def test_a_unix_socket_left_by_a_dead_server_is_taken_over(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/s.sock"
    async with serving(Echo(), listen):
        pass

    async with serving(Echo(), listen) as server, aio_channel(server.address) as channel:
        assert await call_kind(channel, "Unary", b"a") == [b"a"]


async def test_a_quiet_stream_lives_on_while_its_client_asks_whether_it_is_alive(tmp_path: Path) -> None:
    pinging: list[tuple[str, int]] = [("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0)]
    async with (
        serving(Echo(), f"unix:{tmp_path}/s.sock", min_ping_interval_s=0.5) as server,
        grpc.aio.insecure_channel(server.address.target, options=pinging) as channel,
    ):
        call: Any = channel.stream_stream(f"/{SERVICE}/Converse")()
        await call.write(b"a")
        assert await call.read() == b"a"
        with pytest.raises(TimeoutError):  # the fourth ping would have ended it
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(call.read())), 5.5)
        await call.write(b"b")
        call.cancel()


async def test_port_zero_becomes_the_port_that_was_bound() -> None:
    async with serving(Echo(), "127.0.0.1:0") as server, aio_channel(server.address) as channel:
        assert not server.address.target.endswith(":0")
        assert await call_kind(channel, "Unary", b"a") == [b"a"]


async def test_an_address_beyond_this_host_is_refused_before_it_is_bound() -> None:
    with pytest.raises(StartupError, match="--insecure"):
        RpcServer(Address.parse("0.0.0.0:0"), ServerSecurity(), [SERVICE])


async def test_an_address_that_is_not_ours_is_a_startup_error() -> None:
    server = RpcServer(Address.parse("198.51.100.1:1"), ServerSecurity(insecure=True), [SERVICE])

    with pytest.raises(StartupError, match=r"198\.51\.100\.1:1"):
        await server.start()
    await server.stop(0)


async def test_tls_serves_those_who_trust_it_and_nobody_else(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    security = ServerSecurity(tls_cert=cert, tls_key=key, token="user")
    async with serving(Echo(), "127.0.0.1:0", security) as server:
        trusting = ChannelSecurity(tls_ca=cert, token="user")
        async with aio_channel(server.address, trusting) as channel:
            assert await call_kind(channel, "Unary", b"a", metadata=trusting.metadata()) == [b"a"]
        async with aio_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call_kind(channel, "Unary", b"a", timeout=10.0, metadata=trusting.metadata())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_tls_with_a_client_authority_asks_callers_for_a_certificate(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    security = ServerSecurity(tls_cert=cert, tls_key=key, tls_client_ca=cert)
    async with serving(Echo(), "127.0.0.1:0", security) as server:
        async with aio_channel(server.address, ChannelSecurity(tls_ca=cert, tls_cert=cert, tls_key=key)) as channel:
            assert await call_kind(channel, "Unary", b"a") == [b"a"]
        async with aio_channel(server.address, ChannelSecurity(tls_ca=cert)) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await call_kind(channel, "Unary", b"a", timeout=10.0)


async def test_health_and_reflection_answer_without_a_token(tmp_path: Path) -> None:
    async with (
        serving(Echo(), f"unix:{tmp_path}/s.sock", ServerSecurity(token="user")) as server,
        aio_channel(server.address) as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == _SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answers = [answer async for answer in reflection.ServerReflectionInfo(asked)]
        assert SERVICE in [found.name for found in answers[0].list_services_response.service]


async def test_sigterm_refuses_new_calls_and_lets_running_ones_finish(tmp_path: Path) -> None:
    running, may_finish = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes) -> None:
        running.set()
        await may_finish.wait()

    async with serving(Echo(wait), f"unix:{tmp_path}/s.sock") as server, aio_channel(server.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        seen = health.Watch(health_pb2.HealthCheckRequest())
        assert (await seen.read()).status == _SERVING
        stopped = asyncio.create_task(server.wait_for_stop())
        call = asyncio.create_task(call_kind(channel, "Stream", b"a"))
        await running.wait()

        os.kill(os.getpid(), signal.SIGTERM)
        await stopped
        draining = asyncio.create_task(server.stop(30.0))
        assert (await seen.read()).status == _NOT_SERVING
        seen.cancel()

        may_finish.set()
        assert await call == [b"a", b"a"]
        await draining
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_kind(channel, "Unary", b"a", timeout=10.0)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_calls_beyond_the_limit_are_refused_as_overload(tmp_path: Path) -> None:
    running, may_finish = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes) -> None:
        running.set()
        await may_finish.wait()

    listen = f"unix:{tmp_path}/s.sock"
    async with serving(Echo(wait), listen, max_concurrent_calls=1) as server, aio_channel(server.address) as channel:
        call = asyncio.create_task(call_kind(channel, "Unary", b"a"))
        await running.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_kind(channel, "Unary", b"b")
        assert type(from_rpc_error(caught.value)) is Overloaded

        may_finish.set()
        assert await call == [b"a"]


async def test_calls_that_outlast_the_grace_are_ended(tmp_path: Path) -> None:
    running, ended = asyncio.Event(), asyncio.Event()

    async def hang(request: bytes) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with serving(Echo(hang), f"unix:{tmp_path}/s.sock") as server, aio_channel(server.address) as channel:
        call = asyncio.create_task(call_kind(channel, "Unary", b"a"))
        await running.wait()

        await server.stop(0.01)

        await asyncio.wait_for(ended.wait(), 10.0)
        with pytest.raises(grpc.aio.AioRpcError):
            await call
