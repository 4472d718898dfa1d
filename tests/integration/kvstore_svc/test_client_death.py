"""A client that dies or sleeps harms nobody: what it held comes back, what it may still write is given to nobody."""

import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import closing

import pytest

from common.patience import Patience
from tests.integration.kvstore_svc.store_process import StoreProcess, key, wait_until
from tests.integration.kvstore_svc.victim import Victim


@pytest.mark.parametrize("phase", ["reserving", "reserved", "writing", "reading"])
def test_what_a_killed_client_held_comes_back_at_once(store: StoreProcess, phase: str) -> None:
    """Long before the session's time to live, which is 30 s here."""
    with closing(Victim(store, phase)) as victim:
        assert [session.client_id for session in store.stats().sessions] == ["victim"]

        victim.send(signal.SIGKILL)

        wait_until(lambda: not store.stats().sessions)
        tier = store.stats().tiers[0]
        assert tier.num_leased_blocks == 0
        assert tier.used_bytes == 4096 * tier.num_blocks
        assert tier.num_blocks == (1 if phase == "reading" else 0)


def test_a_block_that_was_half_sent_inline_leaves_nothing(store: StoreProcess) -> None:
    with closing(Victim(store, "putting")) as victim:
        wait_until(lambda: store.stats().tiers[0].num_leased_blocks == 1)

        victim.send(signal.SIGKILL)

        wait_until(lambda: store.stats().tiers[0].used_bytes == 0)


def test_a_client_in_other_namespaces_maps_the_slabs_and_its_death_is_seen(store: StoreProcess) -> None:
    """As in containers that share the sockets' folder and nothing else."""
    unshare = ["unshare", "--user", "--map-current-user", "--ipc", "--net", "--uts", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us make namespaces")
    with closing(Victim(store, "reading", prefix=unshare)) as victim:
        assert store.stats().tiers[0].num_leased_blocks == 1

        victim.send(signal.SIGKILL)

        wait_until(lambda: not store.stats().sessions)
        assert store.stats().tiers[0].num_leased_blocks == 0


def test_a_sleeping_client_is_fenced_and_its_late_write_reaches_nobody(start_store: Callable[..., StoreProcess]) -> None:
    store = start_store("--session-ttl-s", "1", "--heartbeat-s", "0.2")
    good = bytes(range(256)) * 16
    with closing(Victim(store, "sleeping")) as victim, closing(store.client("shm")) as client:
        victim.send(signal.SIGSTOP)
        wait_until(lambda: store.stats().num_fenced_sessions == 1)
        assert store.stats().num_quarantined_blocks == 1
        assert client.save([(key(1), memoryview(good))]).num_written == 1

        victim.send(signal.SIGCONT)
        victim.go_on()

        assert victim.hear() == "STALE_EPOCH"
        into = bytearray(4096)
        assert client.load([(key(1), memoryview(into))], Patience(5.0)).num_loaded == 1
        assert into == good
        assert store.stats().num_quarantined_blocks == 1, "its process lives and has the slabs mapped"

        victim.send(signal.SIGKILL)
        wait_until(lambda: store.stats().num_quarantined_blocks == 0)


def test_a_long_quarantine_is_an_alarm(start_store: Callable[..., StoreProcess]) -> None:
    store = start_store("--session-ttl-s", "0.5", "--heartbeat-s", "0.1", "--quarantine-s", "0.1")
    with closing(Victim(store, "sleeping")) as victim:
        victim.send(signal.SIGSTOP)

        wait_until(lambda: "its process lives on and holds 1 leases" in store.log)
        assert store.stats().num_quarantined_blocks == 1


def test_a_silent_inline_client_loses_its_session(start_store: Callable[..., StoreProcess]) -> None:
    store = start_store("--session-ttl-s", "1", "--heartbeat-s", "0.2")
    with closing(store.client("inline")) as client:
        client.save([(key(1), memoryview(bytes(4096)))])
        assert len(store.stats().sessions) == 1

    wait_until(lambda: not store.stats().sessions)


def test_a_client_that_closes_leaves_nothing_behind(store: StoreProcess) -> None:
    with closing(store.client("shm")) as client:
        client.save([(key(1), memoryview(bytes(4096)))])
        assert [session.client_id for session in store.stats().sessions] == ["test-shm"]

    wait_until(lambda: not store.stats().sessions)
    assert store.stats().tiers[0].num_leased_blocks == 0
    assert store.stats().num_fenced_sessions == 0
