"""Every GPU workload through gRPC, in process, and beside vLLM's figures of the same card.

    python -m bench.gpu [--models llama-8b,qwen3-0.6b] [--workloads decode,mixed,"prefill 1 x 8192"] [--repeat 2] [--limit 150]
                        [--trace azure_llm_2023_conv.csv] [--mooncake-trace mooncake_conversation.jsonl]
                        [--in-process decode,mixed] [--json FILE]
    python -m bench.gpu --smoke          the same with a tiny model on the CPU, in seconds: tries the benchmark itself out

Clients are processes of their own; so are scheduler, executor and block store. Weights are random, prompts are token ids,
outputs have exact lengths. A workload that fails or takes longer than its limit is said, and the next one follows.
"""

import argparse
import ctypes
import os
import shlex
import signal
import sys
from pathlib import Path

from bench.gpu_cases import Sizes
from bench.gpu_measure import measure
from bench.gpu_options import Options, smoke_options
from bench.models import CONFIGS

NO_GPU = (
    "bench.gpu measures an NVIDIA GPU, and the driver shows none on this machine. Run it where there is one, or try the "
    "benchmark itself out on the CPU: python -m bench.gpu --smoke"
)
_ALL = "decode,prefill,mixed,prefix,azure,turns,reload,mooncake,attention"


def has_gpu() -> bool:
    """Whether the NVIDIA driver shows a GPU. Asks the driver itself: torch would take seconds to import."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def main() -> int:
    """Parses the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-8b,qwen3-0.6b", help=f"of {', '.join(CONFIGS)}")
    parser.add_argument("--workloads", default=_ALL, help="names or their beginnings")
    parser.add_argument("--in-process", default="decode 32,mixed", help="workloads to run in one process, too; empty: none")
    parser.add_argument("--starts", type=int, choices=(0, 1, 2), default=2, help="starts that are timed")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each workload")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of one workload with all its runs")
    parser.add_argument("--trace", type=Path, help="azure_llm_2023_conv.csv of the Azure Public Dataset")
    parser.add_argument("--trace-row", type=int, default=2000, help="first row of the trace that is used")
    parser.add_argument("--mooncake-trace", type=Path, help="mooncake_conversation.jsonl of the Mooncake FAST'25 release")
    parser.add_argument("--clients", type=int, default=0, help="client processes; 0: by the cores")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="tokens of one step")
    parser.add_argument("--executor-flags", default="", help="more flags and values for executor_svc")
    parser.add_argument("--scheduler-flags", default="", help="more flags and values for scheduler_svc")
    parser.add_argument("--store", action="store_true", help="with a block store, which saves every full block")
    parser.add_argument("--json", type=Path, help="also write one JSON line per figure, all sides, to this file")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    arguments = parser.parse_args()
    # Whoever stops this stops the services, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if arguments.smoke:
        options = smoke_options()
    elif not has_gpu():
        print(NO_GPU, file=sys.stderr)
        return 1
    else:
        options = gpu_options(arguments)
    with_attention = not arguments.smoke and "attention" in arguments.workloads.split(",")
    return 0 if measure(options, with_attention=with_attention, json_file=arguments.json) else 1


def gpu_options(arguments: argparse.Namespace) -> Options:
    """Of the command line."""
    num_cores = len(os.sched_getaffinity(0))
    served = _names(arguments.workloads)
    for workload, option, trace in (
        ("azure", "--trace", arguments.trace),
        ("mooncake", "--mooncake-trace", arguments.mooncake_trace),
    ):
        if trace is None and any(name.startswith(workload) for name in served):
            print(f"{workload}: not measured, {option} names no file", file=sys.stderr)
            served = tuple(name for name in served if not name.startswith(workload))
    return Options(
        models=_names(arguments.models),
        served=served,
        in_process=_names(arguments.in_process),
        sizes=Sizes(trace_row=arguments.trace_row),
        device="cuda",
        repeat=arguments.repeat,
        starts=arguments.starts,
        limit_s=arguments.limit,
        num_clients=arguments.clients or max(1, min(4, num_cores // 4)),
        num_threads=max(1, min(8, num_cores // 2)),
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        trace=arguments.trace,
        mooncake_trace=arguments.mooncake_trace,
        more_executor=tuple(shlex.split(arguments.executor_flags)),
        more_scheduler=tuple(shlex.split(arguments.scheduler_flags)),
        with_store=arguments.store,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())
