"""A reserved address is open to this server's processes and closed to every other server."""

import socket

import pytest

from common.errors import StartupError
from common.rpc.address import Address
from common.rpc.shared_port import SharedPort


def listening(port: int, *, shared: bool) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener


@pytest.fixture
def port() -> int:
    with listening(0, shared=False) as probe:
        return int(probe.getsockname()[1])


def test_several_processes_listen_and_a_free_port_is_chosen() -> None:
    shared = SharedPort.reserve(Address("127.0.0.1:0"))
    port = int(shared.address.target.rpartition(":")[2])
    assert port > 0
    with listening(port, shared=True), listening(port, shared=True):
        pass
    shared.close()


def test_a_second_server_is_refused_even_before_anybody_listens(port: int) -> None:
    address = Address(f"127.0.0.1:{port}")
    first = SharedPort.reserve(address)
    with pytest.raises(StartupError, match="in use"):
        SharedPort.reserve(address)
    first.close()
    SharedPort.reserve(address).close()


@pytest.mark.parametrize("shared", [True, False])
def test_an_address_where_somebody_listens_is_refused(port: int, shared: bool) -> None:
    with listening(port, shared=shared), pytest.raises(StartupError, match="in use"):
        SharedPort.reserve(Address(f"127.0.0.1:{port}"))


def test_no_connection_comes_to_the_reservation(port: int) -> None:
    shared = SharedPort.reserve(Address(f"127.0.0.1:{port}"))
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0
    with listening(port, shared=True) as listener, socket.create_connection(("127.0.0.1", port)):
        listener.settimeout(10)
        listener.accept()[0].close()
    shared.close()


def test_a_host_that_is_not_here_is_an_error_of_the_start() -> None:
    with pytest.raises(StartupError, match="cannot be bound"):
        SharedPort.reserve(Address("192.0.2.1:0"))
