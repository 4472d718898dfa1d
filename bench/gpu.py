"""Every GPU workload through gRPC, in process, and beside vLLM's figures of the same card.

    python -m bench.gpu [--models llama-8b,qwen3-0.6b] [--workloads decode,mixed,"prefill 1 x 8192"] [--repeat 2] [--limit 150]
                        [--trace azure_llm_2023_conv.csv] [--mooncake-trace mooncake_conversation.jsonl]
                        [--in-process decode,mixed] [--json FILE]
    python -m bench.gpu --smoke          the same with a tiny model on the CPU, in seconds: tries the benchmark itself out

Clients are processes of their own; so are scheduler, executor and block store. Weights are random, prompts are token ids,
outputs have exact lengths. A workload that fails or takes longer than its limit is said, and the next one follows.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import workloads
from bench.clients import Clients, RunError, running_clients
from bench.comparison import compare, print_comparison
from bench.figures import Figures
from bench.gpu_cases import SMOKE, Bench, Sizes, cases
from bench.models import CONFIGS, make_model_folder
from bench.serving import InProcess, Served, Serving
from bench.store_cases import store_cases
from tests.e2e.stack import StackConfig

NO_GPU = (
    "bench.gpu measures an NVIDIA GPU, and torch finds none on this machine. Run it where there is one, or try the benchmark "
    "itself out on the CPU: python -m bench.gpu --smoke"
)
_ALL = "decode,prefill,mixed,prefix,azure,turns,reload,mooncake,attention"
_MAX_NUM_SEQS = 256
_WARM_UP = workloads.decode(1, 9, 8, 2)


@dataclass(frozen=True)
class Options:
    """What to measure and how.

    Attributes:
        served, in_process: beginnings of names of workloads.
        starts: how often the services are started and timed.
        limit_s: of one workload, and of a start.
        more_executor, more_scheduler: further flags of the services, for experiments.
        with_store: whether there is a block store in the workloads that do not ask for one.
        store_bytes: of a block store.
    """

    models: tuple[str, ...]
    served: tuple[str, ...]
    in_process: tuple[str, ...]
    sizes: Sizes
    device: str
    repeat: int = 2
    starts: int = 2
    limit_s: float = 150.0
    num_clients: int = 4
    num_threads: int = 4
    max_num_batched_tokens: int = 8192
    trace: Path | None = None
    mooncake_trace: Path | None = None
    more_executor: tuple[str, ...] = ()
    more_scheduler: tuple[str, ...] = ()
    with_store: bool = False
    store_bytes: int = 60 << 30

    @property
    def executor_settings(self) -> dict[str, Any]:
        """Of both ways of serving."""
        settings: dict[str, Any] = {
            "load_format": "random",
            "device": self.device,
            "max_num_seqs": _MAX_NUM_SEQS if self.device == "cuda" else 8,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "num_threads": self.num_threads,
        }
        settings |= {"dtype": "bfloat16"} if self.device == "cuda" else {"num_blocks": 256, "backend": "torch"}
        more = self.more_executor
        settings |= {name.removeprefix("--").replace("-", "_"): value for name, value in zip(more[::2], more[1::2], strict=True)}
        return settings

    def stack_config(self, folder: Path) -> StackConfig:
        """Of the services."""
        settings = {name: value for name, value in self.executor_settings.items() if name != "num_threads"}
        flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        return StackConfig(
            model=folder,
            executor_flags=tuple(flags),
            scheduler_flags=("--max-chunk-tokens", str(self.max_num_batched_tokens), *self.more_scheduler),
            store_flags=("--capacity-bytes", str(self.store_bytes)),
            with_store=self.with_store,
            num_threads=self.num_threads,
        )


def chosen(name: str, wanted: Sequence[str]) -> bool:
    """Whether a workload is among those that are wanted by name or by the beginning of it."""
    return any(name == want or name.startswith(f"{want} ") for want in wanted)


def measure_served(options: Options, model: str, folder: Path, figures: Figures, clients: Clients) -> None:
    """Start to first token as often as asked for, then every workload through gRPC."""
    served: Served | None = None
    try:
        for name in ("first", "second")[: options.starts]:
            if served is not None:
                served.stop()
            served = _start_served(options, folder, clients)
            figures.add("start", name, [served.start_s], "s", served.peer, model=model)
            for phase in served.info().startup_phases:
                figures.add("start", f"{name}: {phase.name}", [phase.seconds], "s", served.peer, model=model)
        served = served or _start_served(options, folder, clients)
        for name in wanted_cases(cases(options.sizes), options.served):
            if not served.is_alive:
                served.stop()
                served = _start_served(options, folder, clients)
            if not _measure(_bench(options, model, served, figures), name, cases(options.sizes)[name]):
                print(served.log_tails(), file=sys.stderr, flush=True)
    except RunError as error:
        _say_failed(model, "start", "octavo", error)
    finally:
        if served is not None:
            served.stop()


def measure_capped(options: Options, model: str, folder: Path, figures: Figures, clients: Clients, *, with_store: bool) -> None:
    """The workloads whose KV does not fit the device, with a block store or without one."""
    names = wanted_cases(store_cases(options.sizes), options.served)
    if not names:
        return
    capped = replace(
        options,
        with_store=with_store,
        more_executor=(*options.more_executor, "--num-blocks", str(options.sizes.num_capped_blocks)),
    )
    try:
        served = _start_served(capped, folder, clients)
    except RunError as error:
        _say_failed(model, "start", "octavo", error)
        return
    try:
        for name in names:
            bench = _bench(options, model, served, figures)
            bench.suffix = " + store" if with_store else ""
            if not _measure(bench, name, store_cases(options.sizes)[name]):
                print(served.log_tails(), file=sys.stderr, flush=True)
                if not served.is_alive:
                    return
    finally:
        served.stop()


def measure_in_process(options: Options, model: str, folder: Path, figures: Figures) -> None:
    """The chosen workloads with the engine in one process."""
    names = wanted_cases(cases(options.sizes), options.in_process)
    if not names:
        return
    try:
        engine = InProcess({**options.executor_settings, "model": str(folder)}, options.limit_s)
    except RunError as error:
        _say_failed(model, "start", InProcess.peer, error)
        return
    try:
        for name in names:
            if not _measure(_bench(options, model, engine, figures), name, cases(options.sizes)[name]):
                break  # the child is gone
        if options.device == "cuda" and chosen("decode 32", options.in_process):
            busy = engine.busy_share(workloads.decode(32, 13, options.sizes.decode_prompt, 100), 60, options.limit_s)
            figures.add("decode 32", "GPU idle, by profiler", [100 * (1 - busy)], "%", engine.peer, model=model)
    except RunError as error:
        _say_failed(model, "decode 32", engine.peer, error)
    finally:
        engine.stop()


def wanted_cases(names: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """The names that are wanted, in the order in which they are asked for."""
    known = list(names)
    return list(dict.fromkeys(name for want in wanted for name in known if chosen(name, (want,))))


def _bench(options: Options, model: str, serving: Serving, figures: Figures) -> Bench:
    traces = (options.trace, options.mooncake_trace)
    return Bench(model, serving, figures, options.repeat, options.limit_s, options.sizes, *traces)


def _measure(bench: Bench, name: str, case: Callable[[Bench], None]) -> bool:
    """One workload; False: it failed, and that was said."""
    bench.start_limit()
    try:
        case(bench)
    except RunError as error:
        _say_failed(bench.model, f"{name}{bench.suffix}", bench.peer, error)
        return False
    return True


def _say_failed(model: str, workload: str, peer: str, error: Exception) -> None:
    print(json.dumps({"model": model, "workload": workload, "peer": peer, "error": str(error)}), flush=True)


def _start_served(options: Options, folder: Path, clients: Clients) -> Served:
    served = Served(options.stack_config(folder), clients, _WARM_UP, options.limit_s)
    info = served.info()
    memory = ", ".join(f"{name} {num_bytes / 1e9:.3g} GB" for name, num_bytes in sorted(info.memory_bytes.items()))
    print(
        f"# {info.model}: {info.dtype} on {info.backend} after {served.start_s:.1f} s, {info.num_blocks} blocks of "
        f"{info.block_size} tokens, steps of up to {info.max_num_batched_tokens} tokens; {memory}",
        file=sys.stderr,
        flush=True,
    )
    return served


def measure_attention(figures: Figures, limit_s: float) -> None:
    """Paged decode attention by itself, in a process of its own."""
    try:
        command = [sys.executable, "-m", "bench.attention_gpu"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        _say_failed("", "attention", "octavo", error)
        return
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            figures.add(row["workload"], row["figure"], [row["value"]], row["unit"], "octavo", model="")


def has_gpu() -> bool:
    """Whether torch can use an NVIDIA GPU."""
    import torch

    return torch.cuda.is_available()


def measure(options: Options, *, with_attention: bool, json_file: Path | None) -> bool:
    """Measures everything; False: nothing could be measured."""
    figures = Figures()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="octavo-models-") as parent, running_clients(options.num_clients) as clients:
        for model in options.models:
            folder = make_model_folder(model, Path(parent))
            if options.starts or wanted_cases(cases(options.sizes), options.served):
                measure_served(options, model, folder, figures, clients)
            for with_store in (False, True):
                measure_capped(options, model, folder, figures, clients, with_store=with_store)
            measure_in_process(options, model, folder, figures)
    if with_attention:
        measure_attention(figures, options.limit_s)
    compared = compare(figures)
    print_comparison(compared)
    print(f"took {time.monotonic() - started:.0f} s")
    if json_file is not None:
        json_file.write_text("".join(json.dumps(line.as_row()) + "\n" for line in compared))
    return bool(figures.rows)


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


def smoke_options(trace: Path | None = None) -> Options:
    """A tiny model on the CPU."""
    served = ("decode", "prefill", "mixed", "prefix", "turns", "reload", *(("azure",) if trace is not None else ()))
    return Options(
        ("tiny",), served, ("decode 4", "mixed"), SMOKE, "cpu",
        repeat=1, starts=1, limit_s=60.0, num_clients=2, num_threads=1, max_num_batched_tokens=64, trace=trace,
        store_bytes=64 << 20,
    )  # fmt: skip


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())
