"""Octavo under load, in the two ways that are compared: as processes behind gRPC, and the same engine called in one process.

Knows how to start either and to send a workload to it; knows no figure.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import grpc

from bench.client import Answer
from bench.clients import Clients, Run, RunError
from bench.counters import Counters
from bench.workloads import Turns, Workload
from octavo.executor.v1 import executor_service_pb2, executor_service_pb2_grpc
from octavo.scheduler.v1 import admin_service_pb2, admin_service_pb2_grpc
from tests.e2e.stack import Stack, StackConfig


class Serving(Protocol):
    """Something that answers workloads.

    Attributes:
        peer: its name in figures.
    """

    peer: str

    def flush(self) -> None:
        """Forgets every cached prefix."""
        ...

    def run(self, workload: Workload, timeout_s: float) -> Run:
        """Sends a workload and waits for its end.

        Raises:
            RunError: a request failed, or it took too long.
        """
        ...

    def run_turns(self, turns: Turns, timeout_s: float) -> Run:
        """Sends conversations and waits for their end; the answers of the first turn come first.

        Raises:
            RunError: see run.
        """
        ...

    def counters(self) -> Counters:
        """Sums so far."""
        ...

    def stop(self) -> None:
        """Ends it."""
        ...


class Served:
    """Scheduler, executor and, if asked for, block store as real processes; clients as others.

    Attributes:
        start_s: from nothing to the first token.
    """

    peer = "octavo"

    def __init__(self, config: StackConfig, clients: Clients, warm_up: Workload, timeout_s: float):
        """Starts everything and asks one question.

        Raises:
            RunError: a service did not come up; ends with its log.
        """
        self._clients = clients
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-bench-"))
        self._stack = Stack(self._folder, config)
        started = time.monotonic()
        try:
            self._stack.start()
            self.run(warm_up, timeout_s)
        except (AssertionError, RunError, grpc.RpcError) as error:
            tails = self.log_tails(40)
            self.stop()
            raise RunError(f"{error}\n{tails}") from error
        except BaseException:  # whoever interrupts this wants no processes left
            self.stop()
            raise
        self.start_s = time.monotonic() - started

    @property
    def is_alive(self) -> bool:
        """Whether every process runs."""
        return all(process.popen.poll() is None for process in self._stack.processes.values())

    def flush(self) -> None:
        with self._stack.channel() as channel:
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)
            admin.FlushCache(admin_service_pb2.FlushCacheRequest(include_store=True), timeout=30)

    def flush_device(self) -> None:
        """Forgets what devices have cached; the block store keeps what it has."""
        self._stack.flush_device()

    def log_of(self, name: str) -> str:
        """The log of one process, so far."""
        return self._stack.processes[name].log.read_text(errors="replace")

    def run(self, workload: Workload, timeout_s: float) -> Run:
        return self._clients.run(self._stack.target, workload.items, timeout_s)

    def run_turns(self, turns: Turns, timeout_s: float) -> Run:
        return self._clients.run_turns(self._stack.target, turns, timeout_s)

    def counters(self) -> Counters:
        with self._stack.channel() as channel:
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)
            load = admin.GetLoad(admin_service_pb2.GetLoadRequest(), timeout=10).load
        busy_s = sum(e.step_s * e.num_steps for e in load.executors)
        return Counters(
            sum(e.num_steps for e in load.executors),
            busy_s,
            load.num_preemptions,
            load.num_cached_tokens,
            dict(load.degraded),
        )

    def info(self) -> executor_service_pb2.ExecutorInfo:
        """What the executor says of itself."""
        with grpc.insecure_channel(f"unix:{self._folder}/executor-0.sock") as channel:
            executor = executor_service_pb2_grpc.ExecutorServiceStub(channel)
            return executor.GetExecutorInfo(executor_service_pb2.GetExecutorInfoRequest(), timeout=10).info

    def log_tails(self, num_lines: int = 12) -> str:
        """The end of every process's log."""
        return "\n".join(f"[{process.name}]\n{process.tail(num_lines)}" for process in self._stack.processes.values())

    def stop(self) -> None:
        self._stack.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


class InProcess:
    """Scheduler core and executor engine in one loop of one child process: no gRPC, no text, no store."""

    peer = "in process"

    def __init__(self, settings: Mapping[str, Any], timeout_s: float):
        """Starts the child and waits until it is ready.

        Args:
            settings: of ExecutorSettings.
            timeout_s: for its start.

        Raises:
            RunError: it did not come up.
        """
        from executor_svc.settings import ExecutorSettings
        from executor_svc.worker_process import worker_environment

        checked = ExecutorSettings.model_validate(settings)
        command = [sys.executable, "-m", "bench.in_process"]
        environment = worker_environment(checked)
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self._reader = ThreadPoolExecutor(1)
        self._ask(json.loads(checked.to_json()), timeout_s)

    def flush(self) -> None:
        self._ask({"command": "flush"}, 60.0)

    def run(self, workload: Workload, timeout_s: float) -> Run:
        items = [(item.prompt_token_ids, item.num_output_tokens, item.arrival_s) for item in workload.items]
        reply = self._ask({"command": "run", "items": items}, timeout_s)
        return Run(tuple(Answer(**answer) for answer in reply["answers"]))

    def run_turns(self, turns: Turns, timeout_s: float) -> Run:
        raise RunError("conversations are measured through gRPC only")

    def busy_share(self, workload: Workload, num_steps: int, timeout_s: float) -> float:
        """Share of the time with a kernel on the device, in num_steps decode steps of the workload, by the profiler."""
        items = [(item.prompt_token_ids, item.num_output_tokens, item.arrival_s) for item in workload.items]
        return float(self._ask({"command": "profile", "items": items, "num_steps": num_steps}, timeout_s)["busy_share"])

    def counters(self) -> Counters:
        return Counters(**self._ask({"command": "counters"}, 60.0))

    def stop(self) -> None:
        self._child.kill()
        self._child.wait()
        self._reader.shutdown()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
            reply: dict[str, Any] = json.loads(self._reader.submit(self._child.stdout.readline).result(timeout_s))
        except (TimeoutError, ValueError, OSError) as error:
            self._child.kill()
            raise RunError(f"the engine in process ended or did not answer within {timeout_s:.0f} s: {error!r}") from error
        if "error" in reply:
            raise RunError(reply["error"])
        return reply
