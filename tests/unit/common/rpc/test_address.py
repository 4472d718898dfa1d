"""Addresses: what is read, what is local, and one server per unix socket."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import StartupError
from common.rpc.address import Address, lock_socket


@pytest.mark.parametrize(
    ("text", "target", "is_local"),
    [
        (":50051", "127.0.0.1:50051", True),
        ("127.0.0.2:1", "127.0.0.2:1", True),
        ("localhost:0", "localhost:0", True),
        ("[::1]:50051", "[::1]:50051", True),
        ("unix:/run/octavo/s.sock", "unix:/run/octavo/s.sock", True),
        ("0.0.0.0:50051", "0.0.0.0:50051", False),
        ("[::]:50051", "[::]:50051", False),
        ("192.168.1.7:50051", "192.168.1.7:50051", False),
        ("example.org:443", "example.org:443", False),
    ],
)
def test_an_address_is_read_and_judged(text: str, target: str, is_local: bool) -> None:
    address = Address.parse(text)

    assert (address.target, address.is_local) == (target, is_local)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "50051",
        "localhost",
        "localhost:http",
        "localhost:65536",
        "localhost:-1",
        "localhost:²",
        "http://localhost:1",
        "::1:50051",
        "unix:",
        "unix:" + "x" * 108,
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match="address"):
        Address.parse(text)


def test_a_unix_socket_has_a_path_and_a_port_has_none() -> None:
    assert Address.parse("unix:/run/s.sock").socket_path == Path("/run/s.sock")
    assert Address.parse(":1").socket_path is None


def test_a_unix_socket_is_locked_by_one_process_until_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "private" / "s.sock"
    lock = lock_socket(path)
    with pytest.raises(StartupError, match="another process listens there"):
        lock_socket(path)
    other = subprocess.run(
        [sys.executable, "-c", f"from common.rpc.address import *; lock_socket(Path({str(path)!r}))"], capture_output=True
    )
    assert other.returncode != 0

    lock.close()

    lock_socket(path).close()
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StartupError, match="cannot listen on unix:"):
        lock_socket(tmp_path / "file" / "s.sock")
