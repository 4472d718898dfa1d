"""`cpu-a`, `cpu-b` and `cpu-c` through gRPC, beside transformers' generate and beside the same engine in one process.

    python -m bench.cpu [--dtypes float32,bfloat16] [--repeat 3] [--traces FOLDER] [--json FILE]

Every process gets all cores, never two of them at once: the peers take turns, so only ratios within one run mean anything.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figures
from bench.workloads import Workload, cpu_a, cpu_b, cpu_c
from octavo.scheduler.v1 import admin_service_pb2, admin_service_pb2_grpc, inference_service_pb2_grpc
from tests.e2e.stack import Answer, Stack, StackConfig, collect, greedy_request, running_stack

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
    """Empties the device's prefix cache and the store."""
    with stack.channel() as channel:
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        admin.FlushCache(admin_service_pb2.FlushCacheRequest(include_store=True), timeout=30)


def measure_octavo(figures: Figures, folder: Path, dtype: str, quantization: str, repeat: int, num_threads: int) -> None:
    """Octavo's three processes."""
    name = f"octavo {dtype}" if quantization == "none" else f"octavo {quantization}"
    flags = ("--dtype", dtype, "--quantization", quantization)
    with running_stack(StackConfig(folder, executor_flags=flags, num_threads=num_threads)) as stack:
        for make in WORKLOADS:
            workload = make()
            run_served(stack, workload)  # warms kernels and threads up
            cold, again = [], []
            for _ in range(repeat):
                flush(stack)
                cold.append(run_served(stack, workload))
                again.append(run_served(stack, workload))
            add_runs(figures, workload, name, cold, again)


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


def measure_transformers(figures: Figures, folder: Path, dtype: str, repeat: int, num_threads: int) -> None:
    """Generate of transformers itself."""
    from bench.transformers_peer import TransformersPeer

    peer = TransformersPeer(folder, dtype, num_threads)
    name = f"transformers {dtype}"
    for make in WORKLOADS:
        workload = make()
        runs = [peer.run(workload) for _ in range(repeat)]
        rate = [workload.num_output_tokens / r.total_s for r in runs]
        match workload.name:
            case "cpu-a":
                figures.add("cpu-a", "ttft", [r.first_token_s for r in runs], "s", name)
                figures.add("cpu-a", "output", rate, "tokens/s", name)
            case "cpu-b":
                figures.add("cpu-b", "output", rate, "tokens/s", name)
                figures.add("cpu-b", "mean ttft", [r.first_token_s for r in runs], "s", name)
            case _:
                figures.add("cpu-c", "cold", [r.total_s for r in runs], "s", name)
                figures.add("cpu-c", "again", [r.total_s for r in runs], "s", name)
    del peer
    gc.collect()


def main() -> None:
    """Runs everything and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    arguments = parser.parse_args()
    from executor_svc.model.prepare import prepare_model
    from executor_svc.settings import default_cache_dir

    folder = prepare_model(arguments.model, default_cache_dir(), print)
    num_threads = len(os.sched_getaffinity(0))
    figures = Figures()
    for dtype in arguments.dtypes.split(","):
        measure_octavo(figures, folder, dtype, "none", arguments.repeat, num_threads)
        measure_transformers(figures, folder, dtype, arguments.repeat, num_threads)
    figures.print_table()


if __name__ == "__main__":
    main()
