"""Real services as processes, for tests: started on a unix socket of a folder, stopped at the end whatever happens."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

START_TIMEOUT_S = 60.0


@dataclass
class ServiceProcess:
    """A running service.

    Attributes:
        target: its address.
        log: file with its standard error.
    """

    popen: "subprocess.Popen[bytes]"
    target: str
    log: Path

    def children(self) -> list[int]:
        """Process ids of its children."""
        return [int(pid) for pid in Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()]

    def log_text(self) -> str:
        """What it has logged."""
        return self.log.read_text(errors="replace")

    def health(self) -> int:
        """What its health service says."""
        with grpc.insecure_channel(self.target) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0, wait_for_ready=True).status)

    def wait_serving(self) -> None:
        """Returns when it serves; fails with its log when it ends before."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.popen.poll() is None and time.monotonic() < deadline:
            try:
                if self.health() == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"not serving:\n{self.log_text()}")


@contextmanager
def running(module: str, folder: Path, flags: Sequence[str], *, name: str = "service") -> Iterator[ServiceProcess]:
    """Runs python -m module on a socket of the folder; killed at the end if it still runs."""
    target, log = f"unix:{folder}/{name}.sock", folder / f"{name}.log"
    with log.open("wb") as output:
        popen = subprocess.Popen([sys.executable, "-m", module, "--listen", target, *flags], stderr=output, stdout=output)
    try:
        yield ServiceProcess(popen, target, log)
    finally:
        if popen.poll() is None:
            popen.send_signal(signal.SIGTERM)
            try:
                popen.wait(15)
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()


def executor_flags(folder: Path, *more: str) -> list[str]:
    """Flags of a small executor of a random model in the folder."""
    flags = ["--model", str(folder), "--load-format", "random", "--backend", "torch", "--num-threads", "1"]
    return [*flags, "--num-blocks", "64", "--block-size", "4", *more]
