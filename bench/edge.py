"""What streams cost the engine's process, and what they cost edge processes: CPU by process while many streams run.

    python -m bench.edge [--edge-processes 0,1,2] [--streams 256] [--step-ms 40] [--steps 400] [--model FOLDER] [--json FILE]

The executor is a script that computes nothing, so all of the CPU is Octavo's. Steps take a given time: what changes is the CPU,
and with it the step time that the engine could keep up with. Ratios mean something; seconds are those of the machine.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import grpc

from bench.clients import Run, running_clients
from bench.figures import Figures
from bench.workloads import WorkItem
from octavo.scheduler.v1 import admin_service_pb2, admin_service_pb2_grpc
from tests.unit.scheduler_svc.text.small_tokenizers import BYTE_VOCAB_SIZE, write_model_folder

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PROMPT_TOKENS = 64
_NUM_CLIENTS = 4
_INTERVAL_S = 1.0


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        num_steps: output tokens of every stream.
        model: folder whose tokenizer makes the text; None: a small one.
    """

    num_streams: int
    step_ms: float
    num_steps: int
    model: Path | None


@dataclass(frozen=True)
class Sample:
    """Sums at one moment."""

    at_s: float
    num_steps: int
    engine_cpu_s: float
    edge_cpu_s: float


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    return [int(text) for path in Path(f"/proc/{pid}/task").glob("*/children") for text in path.read_text().split()]


def sample(pid: int, admin: admin_service_pb2_grpc.AdminServiceStub) -> tuple[Sample, int]:
    """Sums of now, and how many requests run."""
    load = admin.GetLoad(admin_service_pb2.GetLoadRequest(), timeout=10).load
    num_steps = sum(executor.num_steps for executor in load.executors)
    edge_cpu_s = sum(cpu_s(child) for child in children(pid))
    return Sample(time.monotonic(), num_steps, cpu_s(pid), edge_cpu_s), load.num_running_requests


def measure(num_edges: int, options: Options, figures: Figures) -> None:
    """One server with so many edge processes, from its start to its end."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-bench-"))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        model = options.model or write_model_folder(folder / "model")
        executor = f"unix:{folder}/executor.sock"
        scripted = [sys.executable, "-m", "bench.scripted_executor", executor]
        scripted += [str(options.step_ms), str(options.num_streams), str(BYTE_VOCAB_SIZE)]
        processes.append(subprocess.Popen(scripted))
        target = f"127.0.0.1:{_free_port()}"
        command = [sys.executable, "-m", "scheduler_svc", "--listen", target, "--executors", executor, "--model", str(model)]
        command += ["--edge-processes", str(num_edges), "--model-name", "scripted", "--log-level", "WARNING"]
        processes.append(subprocess.Popen(command))
        _measure_running(processes[-1].pid, target, f"{num_edges} edges", options, figures)
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _measure_running(pid: int, target: str, peer: str, options: Options, figures: Figures) -> None:
    prompt = [_PROMPT_TOKENS % 64 + 32] * _PROMPT_TOKENS
    items = [WorkItem((32 + i % 64, 32 + i // 64, *prompt), options.num_steps, 0.0) for i in range(options.num_streams)]
    with grpc.insecure_channel(target) as channel, running_clients(_NUM_CLIENTS) as clients:
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        admin.GetLoad(admin_service_pb2.GetLoadRequest(), timeout=60, wait_for_ready=True)
        runs: list[Run] = []
        thread = threading.Thread(target=lambda: runs.append(clients.run(target, items, 600.0)))
        thread.start()
        while sample(pid, admin)[1] < options.num_streams and thread.is_alive():
            time.sleep(0.05)
        time.sleep(1.0)
        before = last = sample(pid, admin)[0]
        while True:
            time.sleep(_INTERVAL_S)
            now, num_running = sample(pid, admin)
            if num_running < options.num_streams:
                break
            last = now
        thread.join()
        if not runs:
            raise SystemExit("the clients failed")
        if last is before:
            raise SystemExit("all streams together ran for less than two seconds: more --steps")
    num_steps, seconds = last.num_steps - before.num_steps, last.at_s - before.at_s
    num_tokens = num_steps * options.num_streams
    messages_per_token = sum(answer.num_messages for answer in runs[0].answers) / runs[0].num_output_tokens
    engine_s, edge_s = last.engine_cpu_s - before.engine_cpu_s, last.edge_cpu_s - before.edge_cpu_s
    name = f"{options.num_streams} streams"
    figures.add(name, "engine CPU per step", engine_s / num_steps * 1e3, "ms", peer)
    figures.add(name, "engine CPU per 1,000 tokens", engine_s / num_tokens * 1e6, "ms", peer)
    figures.add(name, "edge CPU per step", edge_s / num_steps * 1e3, "ms", peer)
    figures.add(name, "edge CPU per message", edge_s / (num_tokens * messages_per_token) * 1e6, "us", peer)
    figures.add(name, "messages per stream", num_tokens * messages_per_token / options.num_streams / seconds, "1/s", peer)
    figures.add(name, "step", seconds / num_steps * 1e3, "ms", peer)
    figures.add(name, "output", num_tokens / seconds, "tokens/s", peer)
    first = sorted(runs[0].first_token_s)
    figures.add(name, "ttft p50", first[len(first) // 2] * 1e3, "ms", peer)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Measures every number of edge processes that was asked for, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--edge-processes", default="0,1,2", help="numbers of edge processes")
    parser.add_argument("--streams", type=int, default=256, help="streams at once")
    parser.add_argument("--step-ms", type=float, default=40.0, help="time of a step")
    parser.add_argument("--steps", type=int, default=400, help="output tokens of every stream")
    parser.add_argument("--model", type=Path, help="folder whose tokenizer makes the text")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    options = Options(arguments.streams, arguments.step_ms, arguments.steps, arguments.model)
    figures = Figures()
    for number in arguments.edge_processes.split(","):
        measure(int(number), options, figures)
    figures.print_table()
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(row) + "\n" for row in figures.rows))


if __name__ == "__main__":
    main()
