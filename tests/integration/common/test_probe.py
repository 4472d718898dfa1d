"""The health probe against a real server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from common.rpc.address import Address
from common.rpc.probe import main, probe
from common.rpc.security import ServerSecurity
from common.rpc.server import RpcServer

SERVICE = "octavo.scheduler.v1.InferenceService"


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[RpcServer]:
    server = RpcServer(Address.parse(f"unix:{tmp_path}/s.sock"), ServerSecurity(token="secret"), [SERVICE])
    await server.start()
    yield server
    await server.stop(0)


async def test_a_started_server_is_serving_without_a_token(server: RpcServer) -> None:
    assert await asyncio.to_thread(probe, server.address) == "SERVING"
    assert await asyncio.to_thread(probe, server.address, SERVICE) == "SERVING"


async def test_a_draining_server_is_not_serving(server: RpcServer) -> None:
    await server.set_serving(False)
    assert await asyncio.to_thread(probe, server.address) == "NOT_SERVING"


async def test_a_service_that_the_server_lacks_is_unknown(server: RpcServer) -> None:
    assert await asyncio.to_thread(probe, server.address, "octavo.kvstore.v1.KvStoreService") == "SERVICE_UNKNOWN"


def test_no_server_is_unreachable(tmp_path: Path) -> None:
    assert probe(Address.parse(f"unix:{tmp_path}/none.sock"), timeout_s=2) == "UNREACHABLE"


async def test_exit_status_tells_serving_from_the_rest(server: RpcServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, [server.address.target, SERVICE]) == 0
    await server.set_serving(False)
    assert await asyncio.to_thread(main, [server.address.target, SERVICE]) == 1
    assert f"{SERVICE} NOT_SERVING" in capsys.readouterr().out


def test_an_address_that_is_none_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere"]) == 2
    assert "expected host:port" in capsys.readouterr().err
