"""`cpu-a`, `cpu-b` and `cpu-c` through gRPC, beside transformers' generate and beside the same engine in one process.

    python -m bench.cpu [--dtypes float32,bfloat16] [--repeat 2] [--trace azure_llm_2023_conv.csv] [--json FILE]

Every process gets all cores, never two of them at once: the peers take turns, run by run. Only ratios mean anything.
Then weight-only int8 against fp32 (share of equal top-1 tokens), and the KV waste of the running block pool on a trace.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figures
from bench.int8_agreement import add_agreement, most_likely_tokens
from bench.kv_waste import measure_kv_waste, read_trace, report
from bench.serving import InProcess
from bench.transformers_peer import PeerRun, TransformersPeer
from bench.workloads import Workload, cpu_a, cpu_b, cpu_c
from octavo.scheduler.v1 import admin_service_pb2, admin_service_pb2_grpc, inference_service_pb2_grpc
from tests.e2e.stack import Answer, Stack, StackConfig, collect, greedy_request, running_stack

_IN_PROCESS_TIMEOUT_S = 600.0

WORKLOADS: tuple[Callable[[], Workload], ...] = (cpu_a, cpu_b, cpu_c)


@dataclass(frozen=True)
class ServedRun:
    """One run of a workload as its clients saw it."""

    answers: list[Answer]
    total_s: float

    @property
    def mean_first_token_s(self) -> float:
        """Mean time to first token."""
        return sum(a.first_token_s for a in self.answers) / len(self.answers)


def run_served(stack: Stack, workload: Workload) -> ServedRun:
    """All requests of a workload at once, each on a stream of its own."""
    with stack.channel() as channel, ThreadPoolExecutor(len(workload.items)) as pool:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        start = time.perf_counter()
        answers = list(
            pool.map(lambda item: collect(stub, greedy_request(item.prompt_token_ids, item.num_output_tokens)), workload.items)
        )
        return ServedRun(answers, time.perf_counter() - start)


def flush(stack: Stack) -> None:
    """Empties the device's prefix cache and the store; nothing is left to be written beside another peer's run."""
    with stack.channel() as channel:
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        admin.FlushCache(admin_service_pb2.FlushCacheRequest(include_store=True), timeout=30)


def measure(figures: Figures, folder: Path, dtype: str, quantization: str, repeat: int, num_threads: int) -> list[int]:
    """Octavo's three processes, and unless quantised transformers and the engine in one process, run by run in turn.

    A virtual machine's speed drifts by a fifth within minutes: only neighbouring runs can be compared.

    Returns:
        The most likely tokens of a text, to compare dtypes with.
    """
    name = f"octavo {dtype}" if quantization == "none" else f"octavo {quantization}"
    flags = ("--dtype", dtype, "--quantization", quantization)
    peer = TransformersPeer(folder, dtype, num_threads) if quantization == "none" else None
    with running_stack(StackConfig(folder, executor_flags=flags, num_threads=num_threads)) as stack:
        for make in WORKLOADS:
            workload = make()
            run_served(stack, workload)  # warms kernels and threads up
            cold, again, peers = [], [], []
            for _ in range(repeat):
                flush(stack)
                cold.append(run_served(stack, workload))
                again.append(run_served(stack, workload))
                if peer is not None:
                    flush(stack)
                    peers.append(peer.run(workload))
            add_runs(figures, workload, name, cold, again)
            if peers:
                add_peer_runs(figures, workload, f"transformers {dtype}", peers)
        if peer is not None:
            measure_split(figures, stack, folder, dtype, 4 * repeat + 1, num_threads)
        return most_likely_tokens(stack)


def measure_split(figures: Figures, stack: Stack, folder: Path, dtype: str, repeat: int, num_threads: int) -> None:
    """What three processes cost for `cpu-b`: served and in one process in turn, both from an empty cache."""
    workload = cpu_b()
    engine = InProcess({"model": str(folder), "dtype": dtype, "num_threads": num_threads}, _IN_PROCESS_TIMEOUT_S)
    try:
        engine.run(workload, _IN_PROCESS_TIMEOUT_S)
        served_s, in_process_s = [], []
        for _ in range(repeat):
            flush(stack)
            served_s.append(run_served(stack, workload).total_s)
            flush(stack)
            engine.flush()
            in_process_s.append(engine.run(workload, _IN_PROCESS_TIMEOUT_S).total_s)
    finally:
        engine.stop()
    costs = [100 * (1 - alone_s / split_s) for split_s, alone_s in zip(served_s, in_process_s, strict=True)]
    rates = [workload.num_output_tokens / s for s in in_process_s]
    figures.add(workload.name, "output", rates, "tokens/s", f"in process {dtype}")
    figures.add(workload.name, "cost of three processes", costs, "%", f"octavo {dtype}")


def add_runs(figures: Figures, workload: Workload, peer: str, cold: list[ServedRun], again: list[ServedRun]) -> None:
    """The figures of one workload."""
    match workload.name:
        case "cpu-a":
            figures.add("cpu-a", "ttft", [r.mean_first_token_s for r in cold], "s", peer)
            figures.add("cpu-a", "output", [workload.num_output_tokens / r.total_s for r in cold], "tokens/s", peer)
        case "cpu-b":
            figures.add("cpu-b", "output", [workload.num_output_tokens / r.total_s for r in cold], "tokens/s", peer)
            figures.add("cpu-b", "mean ttft", [r.mean_first_token_s for r in cold], "s", peer)
        case _:
            figures.add("cpu-c", "cold", [r.total_s for r in cold], "s", peer)
            figures.add("cpu-c", "again", [r.total_s for r in again], "s", peer)


def add_peer_runs(figures: Figures, workload: Workload, peer: str, runs: list[PeerRun]) -> None:
    """The same figures of transformers' generate."""
    rate = [workload.num_output_tokens / r.total_s for r in runs]
    match workload.name:
        case "cpu-a":
            figures.add("cpu-a", "ttft", [r.first_token_s for r in runs], "s", peer)
            figures.add("cpu-a", "output", rate, "tokens/s", peer)
        case "cpu-b":
            figures.add("cpu-b", "output", rate, "tokens/s", peer)
            figures.add("cpu-b", "mean ttft", [r.first_token_s for r in runs], "s", peer)
        case _:
            figures.add("cpu-c", "cold", [r.total_s for r in runs], "s", peer)
            figures.add("cpu-c", "again", [r.total_s for r in runs], "s", peer)


def add_ratios(figures: Figures, dtype: str) -> None:
    """Octavo against transformers, larger is better for Octavo."""
    octavo, peer = f"octavo {dtype}", f"transformers {dtype}"
    for workload, figure in (("cpu-a", "output"), ("cpu-b", "output")):
        ratio = figures.value(workload, figure, octavo) / figures.value(workload, figure, peer)
        figures.add(workload, f"{figure}, times transformers", ratio, "x", octavo)
    for workload, figure in (("cpu-a", "ttft"), ("cpu-b", "mean ttft"), ("cpu-c", "cold"), ("cpu-c", "again")):
        ratio = figures.value(workload, figure, peer) / figures.value(workload, figure, octavo)
        figures.add(workload, f"{figure}, times transformers", ratio, "x", octavo)


def main() -> None:
    """Runs everything and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--trace", type=Path, help="azure_llm_2023_conv.csv of the Azure Public Dataset, for the KV waste")
    parser.add_argument("--json", type=Path, help="also write the JSON lines to this file")
    arguments = parser.parse_args()
    from executor_svc.model.prepare import prepare_model
    from executor_svc.settings import default_cache_dir

    folder = prepare_model(arguments.model, default_cache_dir(), print)
    num_threads = len(os.sched_getaffinity(0))
    figures = Figures()
    tokens: dict[str, list[int]] = {}
    for dtype in arguments.dtypes.split(","):
        tokens[dtype] = measure(figures, folder, dtype, "none", arguments.repeat, num_threads)
        add_ratios(figures, dtype)
    tokens["int8"] = measure(figures, folder, "float32", "int8", arguments.repeat, num_threads)
    if "float32" in tokens:
        add_agreement(figures, tokens["float32"], tokens["int8"])
    if arguments.trace is not None:
        report(figures, measure_kv_waste(read_trace(arguments.trace, 8192, 2000), 16384, 16, 8192))
    else:
        print("KV waste: not measured, --trace names no file", file=sys.stderr)
    figures.print_table()
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(row) + "\n" for row in figures.rows))


if __name__ == "__main__":
    main()
