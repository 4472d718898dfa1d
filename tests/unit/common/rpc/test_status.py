"""Every error over a real wire and back: class, code, reason, field, metadata, delay."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from common import errors
from common.errors import InvalidParameter, ModelNotFound, OctavoError, QueueFull
from common.rpc.address import Address
from common.rpc.channel import aio_channel, sync_channel
from common.rpc.status import DOMAIN, code_name, from_rpc_error, to_status
from tests.unit.common.rpc.echo import SERVICE, Echo, call_kind, serving


def every_error() -> Iterator[OctavoError]:
    """One of each class that goes over the wire, with metadata and where it makes sense a delay."""
    found: list[type[OctavoError]] = [OctavoError]
    for error_class in found:
        found += error_class.__subclasses__()
        if issubclass(error_class, InvalidParameter):
            yield error_class("top_p", "must be in (0, 1], is 1.5 – „no“", metadata={"limit": "1"})
        else:
            delay = 1.25 if issubclass(error_class, errors.Overloaded) else None
            yield error_class("what happened – „so“", metadata={"numWaiting": "3"}, retry_after_s=delay)


ERRORS = {type(error).__name__: error for error in every_error()}


async def raise_named(request: bytes) -> None:
    raise ERRORS[request.decode()]


@pytest.fixture
async def channel(tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with serving(Echo(raise_named), f"unix:{tmp_path}/s.sock") as server, aio_channel(server.address) as channel:
        yield channel


@pytest.mark.parametrize("name", ERRORS)
async def test_an_error_comes_back_as_itself(name: str, channel: grpc.aio.Channel) -> None:
    sent = ERRORS[name]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call_kind(channel, "Unary", name.encode())

    received = from_rpc_error(caught.value)

    assert type(received) is type(sent)
    assert received.message == sent.message
    assert received.metadata == sent.metadata
    assert received.retry_after_s == sent.retry_after_s
    assert caught.value.code().value[0] == sent.code.value
    assert caught.value.code().name == code_name(sent)


@pytest.mark.parametrize("name", ERRORS)
def test_a_status_has_exactly_one_error_info(name: str) -> None:
    status = to_status(ERRORS[name])

    infos = [detail for detail in status.details if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    assert len(infos) == 1
    info = error_details_pb2.ErrorInfo()
    infos[0].Unpack(info)
    assert (info.reason, info.domain) == (ERRORS[name].reason, DOMAIN)


def test_a_bad_parameter_carries_the_standard_violation() -> None:
    violations = error_details_pb2.BadRequest()
    for detail in to_status(InvalidParameter("stop", "at most 16, are 10000")).details:
        detail.Unpack(violations)

    assert [(v.field, v.description) for v in violations.field_violations] == [("stop", "at most 16, are 10000")]


def test_an_unknown_model_carries_its_name() -> None:
    resource = error_details_pb2.ResourceInfo()
    for detail in to_status(ModelNotFound("no such model", metadata={"model": "models/x"})).details:
        detail.Unpack(resource)

    assert (resource.resource_type, resource.resource_name) == ("model", "models/x")


@pytest.mark.parametrize(
    "error",
    [
        OctavoError("ü" * 100_000),
        InvalidParameter("stop", "№" * 100_000, metadata={"value": "ü" * 100_000}),
        ModelNotFound("x" * 100_000, metadata={"model": "y" * 100_000}),
        OctavoError("half a character: \ud800"),
    ],
)
async def test_an_error_of_any_length_arrives(error: OctavoError, tmp_path: Path) -> None:
    async def fail(request: bytes) -> None:
        raise error

    async with serving(Echo(fail), f"unix:{tmp_path}/s.sock") as server, aio_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_kind(channel, "Unary", b"")

    received = from_rpc_error(caught.value)
    assert type(received) is type(error)
    assert received.message[:8] == error.message[:8]


async def test_synchronous_callers_get_the_same(tmp_path: Path) -> None:
    async with serving(Echo(raise_named), f"unix:{tmp_path}/s.sock") as server:

        def call() -> OctavoError:
            with sync_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
                call: Any = channel.unary_unary(f"/{SERVICE}/Unary")
                call(b"QueueFull", timeout=10.0)
            assert isinstance(caught.value, grpc.Call)
            assert rpc_status.from_call(caught.value) is not None
            return from_rpc_error(caught.value)

        received = await asyncio.to_thread(call)

    assert type(received) is QueueFull
    assert received.retry_after_s == 1.25


async def test_an_unreachable_peer_is_unavailable(tmp_path: Path) -> None:
    async with aio_channel(Address.parse(f"unix:{tmp_path}/nobody.sock")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_kind(channel, "Unary", b"x", timeout=10.0)

    assert type(from_rpc_error(caught.value)) is errors.Unavailable


async def test_a_passed_deadline_and_a_too_long_message_have_no_error_info_but_a_class(tmp_path: Path) -> None:
    async with (
        serving(Echo(), f"unix:{tmp_path}/s.sock", max_message_bytes=1000) as server,
        aio_channel(server.address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await call_kind(channel, "Unary", b"x", timeout=-1.0)
        with pytest.raises(grpc.aio.AioRpcError) as long:
            await call_kind(channel, "Unary", b"x" * 1001)

    assert type(from_rpc_error(late.value)) is errors.DeadlineExceeded
    assert type(from_rpc_error(long.value)) is errors.Overloaded
    assert "1001" in from_rpc_error(long.value).message
