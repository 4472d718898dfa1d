"""How the store starts, refuses to start, and stops."""

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.patience import Patience
from tests.integration.kvstore_svc.store_process import MIB, TIMEOUT_S, StoreProcess, key


def run_store(*flags: str) -> "subprocess.CompletedProcess[str]":
    """A store that is expected not to start."""
    command = [sys.executable, "-m", "kvstore_svc", "--capacity-bytes", str(MIB), "--disk-capacity-bytes", "0", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_a_second_store_on_the_same_descriptor_socket_is_refused(store: StoreProcess, tmp_path: Path) -> None:
    second = run_store("--listen", f"unix:{tmp_path}/other.sock", "--shm-socket", str(store.shm_socket))

    assert second.returncode == 1
    assert f"cannot listen on unix:{store.shm_socket}: another process listens there" in second.stderr
    with closing(store.client("shm")) as client:
        assert client.save([(key(1), memoryview(bytes(4096)))]).num_written == 1


def test_a_second_store_on_the_same_socket_is_refused(store: StoreProcess, tmp_path: Path) -> None:
    second = run_store("--listen", store.address.target, "--shm-socket", str(tmp_path / "other.shm"))

    assert second.returncode == 1
    assert f"cannot listen on {store.address.target}: another process listens there" in second.stderr
    assert not (tmp_path / "other.shm").exists()


def test_a_second_store_on_the_same_port_is_refused(start_store: Callable[..., StoreProcess], tmp_path: Path) -> None:
    first = start_store("--listen", "127.0.0.1:0")
    target = first.log.split("listening on ")[1].split(",")[0]

    second = run_store("--listen", target, "--shm-socket", str(tmp_path / "other.shm"))

    assert second.returncode == 1
    assert f"cannot listen on {target}: the address is in use" in second.stderr


def test_more_memory_than_there_is_is_refused_with_the_number_and_the_setting(tmp_path: Path) -> None:
    refused = run_store(
        "--listen", f"unix:{tmp_path}/kv.sock", "--shm-socket", f"{tmp_path}/kv.shm",
        "--capacity-bytes", str(1 << 50), "--slab-bytes", str(1 << 40),
    )  # fmt: skip

    assert refused.returncode == 1
    assert "1125899906842624 bytes wanted" in refused.stderr
    assert "lower --capacity-bytes" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_memory_that_the_kernel_refuses_is_reported_with_the_number_and_the_setting(tmp_path: Path) -> None:
    """The limit on file sizes stands for a full memory file system."""
    code = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        f"sys.argv = ['kvstore_svc', '--listen', 'unix:{tmp_path}/kv.sock', '--shm-socket', '{tmp_path}/kv.shm',"
        "'--disk-capacity-bytes', '0', '--capacity-bytes', '4194304']; runpy.run_module('kvstore_svc', run_name='__main__')"
    )
    refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    assert refused.returncode == 1
    assert "4194304 bytes wanted" in refused.stderr
    assert "lower --capacity-bytes" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_beyond_this_host_needs_protection() -> None:
    refused = run_store("--listen", "0.0.0.0:0")

    assert refused.returncode == 1
    assert "refusing to listen on 0.0.0.0:0" in refused.stderr


def test_a_folder_that_everybody_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)

    refused = run_store("--listen", f"unix:{tmp_path}/kv.sock", "--shm-socket", str(folder / "kv.shm"))

    assert refused.returncode == 1
    assert "can be written by everybody" in refused.stderr


def test_health_is_serving(store: StoreProcess) -> None:
    health: Any = health_pb2_grpc.HealthStub(store.channel)

    for service in ("", "octavo.kvstore.v1.KvStoreService"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_in_good_order_though_clients_are_there(store: StoreProcess, number: signal.Signals) -> None:
    with closing(store.client("shm")) as client:
        client.save([(key(1), memoryview(bytes(4096)))])

        store.process.send_signal(number)

        assert store.process.wait(TIMEOUT_S) == 0
        assert not store.shm_socket.exists()
        assert "Traceback" not in store.log
        assert client.load([(key(1), memoryview(bytearray(4096)))], Patience(1.0)).num_loaded == 0
