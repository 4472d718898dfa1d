"""What the block store refuses to start with."""

import os
from pathlib import Path

import pytest

from common.errors import StartupError
from common.settings import load_settings
from kvstore_svc.settings import KvStoreSettings


def test_defaults_are_private_to_this_host_and_user() -> None:
    settings = load_settings(KvStoreSettings, [])

    assert settings.address().is_local
    assert settings.uids() == {os.getuid()}
    assert str(os.getuid()) in settings.shm_socket_path().parent.name


def test_stores_on_different_addresses_have_different_sockets() -> None:
    first = load_settings(KvStoreSettings, ["--listen", "127.0.0.1:50071"])
    second = load_settings(KvStoreSettings, ["--listen", "127.0.0.1:50072"])

    assert first.shm_socket_path() != second.shm_socket_path()
    assert first.shm_socket_path() == load_settings(KvStoreSettings, []).shm_socket_path()


def test_a_given_socket_path_and_users_are_used() -> None:
    settings = load_settings(KvStoreSettings, ["--shm-socket", "/run/app/kv.shm", "--allowed-uids", "10001, 10002"])

    assert settings.shm_socket_path() == Path("/run/app/kv.shm")
    assert settings.uids() == {10001, 10002}


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--capacity-bytes", "1"], "capacity-bytes"),
        (["--slab-bytes", "0"], "slab-bytes"),
        (["--heartbeat-s", "6"], "heartbeat-s"),
        (["--session-ttl-s", "0"], "session-ttl-s"),
        (["--allowed-uids", "root"], "allowed-uids"),
        (["--capacity-bytes", "1000000000000000", "--slab-bytes", "1048576"], "slab-bytes"),
        (["--no-such-flag", "1"], "no-such-flag"),
    ],
)
def test_bad_values_are_refused_by_name(argv: list[str], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        load_settings(KvStoreSettings, argv)
