"""Real processes for end-to-end tests and benchmarks: one block store, executors and a scheduler on unix sockets of a folder."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.kvstore.v1 import kv_store_service_pb2, kv_store_service_pb2_grpc
from octavo.scheduler.v1 import admin_service_pb2, admin_service_pb2_grpc, inference_service_pb2, inference_service_pb2_grpc

START_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class StackConfig:
    """What to start.

    Attributes:
        model: prepared model folder.
        executor_flags, scheduler_flags, store_flags: added to the command lines.
        with_store: whether there is a block store.
        num_threads: compute threads of each executor.
    """

    model: Path
    executor_flags: tuple[str, ...] = ()
    scheduler_flags: tuple[str, ...] = ()
    store_flags: tuple[str, ...] = ()
    num_executors: int = 1
    with_store: bool = True
    num_threads: int = 2


@dataclass
class Process:
    """A running service and its log."""

    name: str
    popen: "subprocess.Popen[bytes]"
    log: Path

    def tail(self, num_lines: int = 30) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


@dataclass
class Stack:
    """Running processes and stubs to talk to them."""

    folder: Path
    config: StackConfig
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """Address of the public API."""
        return f"unix:{self.folder}/scheduler.sock"

    def spawn(self, name: str, arguments: Sequence[str]) -> None:
        """Starts a service under a name; its log goes to the folder."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            # The unit tests of GPU kernels choose Triton's interpreter for their own process.
            environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
            popen = subprocess.Popen([sys.executable, "-m", *arguments], stdout=output, stderr=output, env=environment)
        self.processes[name] = Process(name, popen, log)

    def start_store(self, more_flags: Sequence[str] = ()) -> None:
        """Starts the block store."""
        self.spawn(
            "kvstore",
            [
                *("kvstore_svc", "--listen", f"unix:{self.folder}/kvstore.sock", "--shm-socket", f"{self.folder}/shm.sock"),
                *("--capacity-bytes", str(1 << 30), "--disk-dir", f"{self.folder}/disk", *self.config.store_flags, *more_flags),
            ],
        )

    def restart_store(self, more_flags: Sequence[str] = ()) -> None:
        """Ends the block store in good order and starts it with more flags; what it had in shared memory is gone."""
        popen = self.processes["kvstore"].popen
        popen.send_signal(signal.SIGTERM)
        popen.wait(30)
        self.start_store(more_flags)
        self.wait_ready("kvstore.sock", "kvstore")

    def flush_device(self) -> None:
        """Has the scheduler forget every cached block on devices."""
        with self.channel() as channel:
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)
            admin.FlushCache(admin_service_pb2.FlushCacheRequest(include_store=False), timeout=30)

    def ask(self, prompt: Sequence[int], max_tokens: int) -> "Answer":
        """One greedy answer."""
        with self.channel() as channel:
            return collect(inference_service_pb2_grpc.InferenceServiceStub(channel), greedy_request(prompt, max_tokens))

    def wait_disk_blocks(self, num_blocks: int, timeout_s: float = 60.0) -> None:
        """Waits until the disk tier has so many blocks."""
        deadline = time.monotonic() + timeout_s
        with grpc.insecure_channel(f"unix:{self.folder}/kvstore.sock") as channel:
            store = kv_store_service_pb2_grpc.KvStoreServiceStub(channel)
            while True:
                tiers = store.GetStats(kv_store_service_pb2.GetStatsRequest(), timeout=5).tiers
                found = sum(tier.num_blocks for tier in tiers if tier.tier == kv_store_service_pb2.TIER_DISK)
                if found >= num_blocks:
                    return
                assert time.monotonic() < deadline, f"{found} of {num_blocks} blocks are on disk"
                time.sleep(0.05)

    def start_executor(self, index: int = 0) -> None:
        """Starts one executor."""
        store = ["--kvstore", f"unix:{self.folder}/kvstore.sock"] if self.config.with_store else []
        self.spawn(
            f"executor-{index}",
            [
                *("executor_svc", "--listen", f"unix:{self.folder}/executor-{index}.sock", "--executor-id", f"executor-{index}"),
                *("--model", str(self.config.model), "--num-threads", str(self.config.num_threads), *store),
                *self.config.executor_flags,
            ],
        )

    def start_scheduler(self) -> None:
        """Starts the scheduler."""
        executors = [
            flag for i in range(self.config.num_executors) for flag in ("--executors", f"unix:{self.folder}/executor-{i}.sock")
        ]
        store = ["--kvstore", f"unix:{self.folder}/kvstore.sock"] if self.config.with_store else []
        self.spawn(
            "scheduler",
            [
                *("scheduler_svc", "--listen", self.target, "--model", str(self.config.model), *executors, *store),
                *self.config.scheduler_flags,
            ],
        )

    def wait_ready(self, socket: str, process: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until a service reports SERVING; fails with its log when it dies first."""
        deadline = time.monotonic() + timeout_s
        with grpc.insecure_channel(f"unix:{self.folder}/{socket}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its published types lack the methods
            while True:
                if self.processes[process].popen.poll() is not None:
                    raise AssertionError(f"{process} ended at start:\n{self.processes[process].tail()}")
                try:
                    response = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.RpcError:
                    pass
                if time.monotonic() > deadline:
                    raise AssertionError(f"{process} is not ready:\n{self.processes[process].tail()}")
                time.sleep(0.05)

    def start(self) -> None:
        """Starts everything and waits until it serves."""
        if self.config.with_store:
            self.start_store()
        for index in range(self.config.num_executors):
            self.start_executor(index)
        self.start_scheduler()
        if self.config.with_store:
            self.wait_ready("kvstore.sock", "kvstore")
        for index in range(self.config.num_executors):
            self.wait_ready(f"executor-{index}.sock", f"executor-{index}")
        self.wait_ready("scheduler.sock", "scheduler")
        self.wait_executors()

    def wait_executors(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until the scheduler holds a session with every executor."""
        deadline = time.monotonic() + timeout_s
        with self.channel() as channel:
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)
            while True:
                info = admin.GetServerInfo(admin_service_pb2.GetServerInfoRequest(), timeout=5.0)
                if sum(e.connected for e in info.executors) == self.config.num_executors:
                    return
                if time.monotonic() > deadline:
                    raise AssertionError(f"executors are not connected:\n{self.processes['scheduler'].tail()}")
                time.sleep(0.05)

    def stop(self) -> dict[str, int]:
        """Stops everything by SIGTERM, scheduler first.

        Returns:
            Exit codes by name.
        """
        codes: dict[str, int] = {}
        for name in reversed(list(self.processes)):
            popen = self.processes[name].popen
            if popen.poll() is None:
                popen.send_signal(signal.SIGTERM)
        for name, process in self.processes.items():
            try:
                codes[name] = process.popen.wait(20)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                codes[name] = process.popen.wait()
        return codes

    def channel(self) -> grpc.Channel:
        """A new channel to the public API."""
        return grpc.insecure_channel(self.target, [("grpc.max_receive_message_length", 64 << 20)])


@contextmanager
def running_stack(config: StackConfig) -> Iterator[Stack]:
    """A stack for the length of a with block."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-"))
    stack = Stack(folder, config)
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Answer:
    """The tokens of every sample of one request, and its usage."""

    token_ids: list[list[int]]
    usage: inference_service_pb2.Usage
    first_token_s: float
    last_token_s: float
    text: list[str]


def greedy_request(
    token_ids: Sequence[int], max_tokens: int, *, n: int = 1, request_id: str = ""
) -> inference_service_pb2.StreamGenerateRequest:
    """A request for exactly max_tokens greedy tokens per sample."""
    request = inference_service_pb2.StreamGenerateRequest()
    generation = request.generation
    generation.token_ids.ids.extend(token_ids)
    generation.sampling.temperature = 0.0
    generation.stopping.max_tokens = max_tokens
    generation.stopping.ignore_eos = True
    generation.output.return_token_ids = True
    generation.n = n
    generation.request_id = request_id
    return request


def collect(
    stub: inference_service_pb2_grpc.InferenceServiceStub,
    request: inference_service_pb2.StreamGenerateRequest,
    timeout_s: float = 600.0,
) -> Answer:
    """Runs one streamed request to its end. Times are seconds from sending."""
    num_samples = max(1, request.generation.n)
    answer = Answer([[] for _ in range(num_samples)], inference_service_pb2.Usage(), 0.0, 0.0, [""] * num_samples)
    start = time.perf_counter()
    for response in stub.StreamGenerate(request, timeout=timeout_s):
        for delta in response.deltas:
            if delta.token_ids:
                answer.last_token_s = time.perf_counter() - start
                answer.first_token_s = answer.first_token_s or answer.last_token_s
            answer.token_ids[delta.index].extend(delta.token_ids)
            answer.text[delta.index] += delta.text
        if response.HasField("usage"):
            answer.usage = response.usage
    return answer
