"""Starts what is to be measured, and measures it: through gRPC, with and without a block store, and in one process.

A workload that fails or takes longer than its limit is said, and the next one follows.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from bench import workloads
from bench.clients import Clients, RunError, running_clients
from bench.comparison import compare, print_comparison
from bench.figures import Figures
from bench.gpu_cases import Bench, cases
from bench.gpu_options import Options
from bench.models import make_model_folder
from bench.serving import InProcess, Served, Serving
from bench.store_cases import store_cases

_WARM_UP = workloads.decode(1, 9, 8, 2)


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
