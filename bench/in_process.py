"""The same engine called in one process: scheduler core and executor in one loop, no gRPC, no text, no store.

    python -m bench.in_process --dtype float32 cpu-a cpu-b       one JSON line per run: {"workload", "total_s"}

What the three processes cost is the difference to this. Started as a process of its own, with the environment of a worker.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.workloads import Workload, cpu_a, cpu_b, cpu_c

WORKLOADS = {"cpu-a": cpu_a, "cpu-b": cpu_b, "cpu-c": cpu_c}


def measure_in_process(folder: Path, dtype: str, workloads: list[str], repeat: int, num_threads: int) -> dict[str, list[float]]:
    """Seconds of every run by workload, measured in a child process."""
    from executor_svc.settings import ExecutorSettings
    from executor_svc.worker_process import worker_environment

    command = [sys.executable, "-m", "bench.in_process", "--model", str(folder), "--dtype", dtype, "--repeat", str(repeat)]
    command += ["--num-threads", str(num_threads), *workloads]
    environment = worker_environment(ExecutorSettings(num_threads=num_threads))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    seconds: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            seconds.setdefault(row["workload"], []).append(row["total_s"])
    return seconds


def _main() -> None:
    from executor_svc.inprocess import InProcessExecutor
    from executor_svc.settings import ExecutorSettings

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS))
    arguments = parser.parse_args()
    settings = ExecutorSettings(model=arguments.model, dtype=arguments.dtype, num_threads=arguments.num_threads)
    executor = InProcessExecutor.from_settings(settings, lambda text: print(text, file=sys.stderr))
    for name in arguments.workloads:
        _run(executor, WORKLOADS[name]())
        for _ in range(arguments.repeat):
            print(json.dumps({"workload": name, "total_s": _run(executor, WORKLOADS[name]())}), flush=True)


def _run(executor: "object", workload: Workload) -> float:
    """One run from an empty cache; seconds until the last token."""
    from common.block_hash import root_key
    from common.ids import RequestId
    from executor_svc.inprocess import InProcessExecutor
    from scheduler_svc import convert
    from scheduler_svc.core.request import Request, SamplingParams, StopConditions
    from scheduler_svc.core.scheduler import Scheduler, SchedulerConfig

    assert isinstance(executor, InProcessExecutor)
    info = executor.info
    executor.reset()
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_chunk_tokens=info.max_num_batched_tokens,
        )
    )
    start = time.perf_counter()
    for i, item in enumerate(workload.items):
        scheduler.add(
            Request(
                request_id=RequestId(str(i)),
                prompt_token_ids=item.prompt_token_ids,
                sampling=SamplingParams(temperature=0.0),
                stop=StopConditions(max_tokens=item.num_output_tokens),
                root_key=root_key(info.kv_fingerprint),
                arrival_s=0.0,
            )
        )
    num_tokens = 0
    while (plan := scheduler.schedule(time.perf_counter() - start)) is not None:
        result = executor.execute(convert.plan_command(plan, plan.step_id).plan)
        for update in scheduler.apply(plan.step_id, convert.sampled_tokens(result), convert.sequence_errors(result)):
            num_tokens += len(update.token_ids)
    assert num_tokens == workload.num_output_tokens
    return time.perf_counter() - start


if __name__ == "__main__":
    _main()
