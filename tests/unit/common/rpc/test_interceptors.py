"""What interceptors do to calls of all four kinds, over a real server."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from common.errors import OctavoError, PermissionDenied, QueueFull, Unauthenticated
from common.rpc.channel import ChannelSecurity, aio_channel
from common.rpc.security import ServerSecurity
from common.rpc.status import from_rpc_error
from tests.unit.common.rpc.echo import KINDS, SERVICE, Echo, call_kind, serving


async def refuse(request: bytes) -> None:
    raise QueueFull("full", retry_after_s=2.0)


async def stumble(request: bytes) -> None:
    raise ZeroDivisionError("a secret of the code")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_good_call_passes_unchanged(kind: str, tmp_path: Path) -> None:
    async with serving(Echo(), f"unix:{tmp_path}/s.sock") as server, aio_channel(server.address) as channel:
        answers = await call_kind(channel, kind, b"a")

    assert answers == ([b"a", b"a"] if kind == "Stream" else [b"a"])


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_of_octavo_becomes_its_status(kind: str, tmp_path: Path) -> None:
    async with serving(Echo(refuse), f"unix:{tmp_path}/s.sock") as server, aio_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_kind(channel, kind, b"a")

    error = from_rpc_error(caught.value)
    assert type(error) is QueueFull
    assert error.retry_after_s == 2.0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bug_is_internal_is_logged_and_tells_callers_nothing(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Echo(stumble), f"unix:{tmp_path}/s.sock") as server, aio_channel(server.address) as channel:
        with caplog.at_level(logging.ERROR, logger="common.rpc.interceptors"), pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_kind(channel, kind, b"a")

    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert type(from_rpc_error(caught.value)) is OctavoError
    assert "secret" not in (caught.value.details() or "")
    assert f"/{SERVICE}/{kind} failed" in caplog.text
    assert "a secret of the code" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_need_the_token(kind: str, tmp_path: Path) -> None:
    security = ServerSecurity(token="user")
    async with serving(Echo(), f"unix:{tmp_path}/s.sock", security) as server, aio_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_kind(channel, kind, b"a")
        answers = await call_kind(channel, kind, b"a", metadata=ChannelSecurity(token="user").metadata())

    assert type(from_rpc_error(caught.value)) is Unauthenticated
    assert answers[0] == b"a"


async def test_calls_of_operators_need_the_admin_token(tmp_path: Path) -> None:
    security = ServerSecurity(token="user", admin_token="admin")
    async with (
        serving(Echo(), f"unix:{tmp_path}/s.sock", security, admin_services=(SERVICE,)) as server,
        aio_channel(server.address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_kind(channel, "Unary", b"a", metadata=ChannelSecurity(token="user").metadata())
        answers = await call_kind(channel, "Unary", b"a", metadata=ChannelSecurity(token="admin").metadata())

    assert type(from_rpc_error(caught.value)) is PermissionDenied
    assert answers == [b"a"]


async def test_an_unknown_method_is_unimplemented(tmp_path: Path) -> None:
    async with serving(Echo(), f"unix:{tmp_path}/s.sock") as server, aio_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            missing: Any = channel.unary_unary(f"/{SERVICE}/Missing")
            await missing(b"")

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_stream_whose_reader_leaves_is_closed_at_once(tmp_path: Path) -> None:
    """The servicer's finally runs when the client cancels, so that its request gives back what it holds."""
    waiting, closed = asyncio.Event(), asyncio.Event()

    async def hang(request: bytes) -> None:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            closed.set()

    echo = Echo(hang)
    async with serving(echo, f"unix:{tmp_path}/s.sock") as server, aio_channel(server.address) as channel:
        stream: Any = channel.unary_stream(f"/{SERVICE}/Stream")
        call = stream(b"a")
        assert await call.read() == b"a"
        await waiting.wait()

        call.cancel()

        await asyncio.wait_for(closed.wait(), 10.0)
    assert echo.num_closed == 1
