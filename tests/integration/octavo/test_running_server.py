"""A real scheduler above two real executors of a tiny model, that run and change while it serves."""

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from octavo.cli.main import app
from octavo.scheduler.v1 import admin_service_pb2, admin_service_pb2_grpc, inference_service_pb2_grpc
from tests.e2e.stack import collect, greedy_request
from tests.integration.executor_svc.processes import ServiceProcess, executor_flags, running
from tests.unit.executor_svc.tiny_engine import make_model_folder

PROMPT = list(range(3, 20))
NUM_TOKENS = 200
TIMEOUT_S = 30.0


@dataclass
class Server:
    """A scheduler process; what it says is kept in a pipe, where no limit on file sizes is in its way."""

    popen: "subprocess.Popen[str]"
    target: str

    def ask(self, num_tokens: int = NUM_TOKENS) -> list[int]:
        with grpc.insecure_channel(self.target) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            return collect(stub, greedy_request(PROMPT, num_tokens), TIMEOUT_S).token_ids[0]

    def degraded(self) -> dict[str, int]:
        with grpc.insecure_channel(self.target) as channel:
            stub = admin_service_pb2_grpc.AdminServiceStub(channel)
            return dict(stub.GetLoad(admin_service_pb2.GetLoadRequest(), timeout=TIMEOUT_S).load.degraded)

    def executors(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["executors", *arguments, "--target", self.target])

    def num_requests(self) -> dict[str, int]:
        """By address of the executor."""
        return {row["address"]: row["num_requests"] for row in json.loads(self.executors("list", "--json").stdout)}


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    folder = tmp_path_factory.mktemp("executors")
    flags = executor_flags(make_model_folder(folder / "model"), "--num-blocks", "512")
    with running("executor_svc", folder, flags, name="e0") as first, running("executor_svc", folder, flags, name="e1") as second:
        first.wait_serving()
        second.wait_serving()
        yield first, second


@contextmanager
def scheduler(folder: Path, *flags: str) -> Iterator[Server]:
    target = f"unix:{folder}/scheduler.sock"
    command = [sys.executable, "-m", "scheduler_svc", "--listen", target, *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as popen:
        try:
            with grpc.insecure_channel(target) as channel:
                grpc.channel_ready_future(channel).result(TIMEOUT_S)
            yield Server(popen, target)
        finally:
            popen.kill()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_executors_join_and_leave_while_requests_run_and_no_token_differs(
    executors: tuple[ServiceProcess, ServiceProcess], tmp_path: Path
) -> None:
    first, second = executors
    with scheduler(tmp_path, "--executors", first.target) as server, ThreadPoolExecutor(8) as pool:
        expected = server.ask()

        def ask_many() -> list["Future[list[int]]"]:
            asked = [pool.submit(server.ask) for _ in range(8)]
            wait_until(lambda: sum(server.num_requests().values()) > 0 or all(one.done() for one in asked))
            return asked

        asked = ask_many()
        joined = server.executors("add", second.target)
        assert (joined.exit_code, f"{second.target} has joined" in joined.output) == (0, True)
        assert [one.result() for one in asked] == [expected] * 8

        asked = ask_many()
        left = server.executors("remove", first.target, "--drain", "0")
        assert (left.exit_code, f"{first.target} has left" in left.output) == (0, True)
        assert [one.result() for one in asked] == [expected] * 8
        assert list(server.num_requests()) == [second.target]

        assert server.executors("add", first.target).exit_code == 0, "its process goes on, and may come back"
        assert server.executors("remove", second.target).exit_code == 0
        assert server.ask() == expected

        stranger = server.executors("add", f"unix:{tmp_path}/nobody.sock", "--wait", "0.2")
        assert (stranger.exit_code, "is not connected" in stranger.output) == (1, True)
        assert server.ask() == expected
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(TIMEOUT_S) == 0


def test_a_full_disk_ends_the_recording_and_nothing_else(
    executors: tuple[ServiceProcess, ServiceProcess], tmp_path: Path
) -> None:
    """The limit on file sizes stands for a full disk, with a frame torn in its middle."""
    recordings = tmp_path / "recordings"
    with scheduler(tmp_path, "--executors", executors[0].target, "--record", str(recordings)) as server:
        expected = server.ask()

        def num_bytes() -> int:
            return sum(path.stat().st_size for path in recordings.glob("*.octrec"))

        wait_until(lambda: num_bytes() > 0)
        limit = num_bytes() + 10
        resource.prlimit(server.popen.pid, resource.RLIMIT_FSIZE, (limit, limit))
        wait_until(lambda: server.ask() == expected and server.degraded().get("recording_ended", 0) == 1)

        assert server.ask() == expected
        assert num_bytes() <= limit
        server.popen.send_signal(signal.SIGTERM)
        _, log = server.popen.communicate(timeout=TIMEOUT_S)
        assert server.popen.returncode == 0
        assert f"recording_ended: {recordings}: File too large" in log
    replayed = CliRunner().invoke(app, ["replay", str(recordings)])
    assert replayed.exit_code == 0, "what came before can be run again"
