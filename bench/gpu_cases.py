"""What is measured of every GPU workload, the way vLLM was measured. Knows workloads and figures; not how they are served."""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import workloads
from bench.clients import Run, RunError
from bench.counters import Counters
from bench.figures import Figures
from bench.serving import Serving
from bench.workloads import Turns, Workload

_WARM_UP_TOKENS = 40_000
"""A single run of more prompt tokens than these, a quick look, has no warm-up before it."""


@dataclass(frozen=True)
class Sizes:
    """How large every workload is.

    Attributes:
        prefills: batch and prompt length.
        prefix: requests, shared tokens, own tokens, output tokens.
        mixed: requests, shortest and longest length.
        azure_rates: requests a second; azure_s: seconds of arrivals.
        trace_row: of the trace's first request.
        turns: users, turns, requests in flight; turn_tokens: of the first prompt, new ones of a turn, of an answer.
        reload: tokens of a prompt.
        mooncake: requests, times as fast.
        num_capped_blocks: of the device's pool, in the workloads that need more than it holds: turns, reload, mooncake.
    """

    decode_batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    decode_prompt: int = 1024
    decode_steps: int = 128
    prefills: tuple[tuple[int, int], ...] = ((1, 1024), (1, 8192), (1, 32000), (16, 8192))
    mixed: tuple[int, int, int] = (256, 100, 1024)
    prefix: tuple[int, int, int, int] = (64, 8192, 128, 64)
    azure_rates: tuple[float, ...] = (16, 28)
    azure_s: float = 30.0
    trace_row: int = 2000
    turns: tuple[tuple[int, int, int], ...] = ((48, 5, 12), (8, 5, 1))
    turn_tokens: tuple[int, int, int] = (4096, 512, 128)
    reload: int = 16_000
    mooncake: tuple[int, float] = (300, 4)
    num_capped_blocks: int = 10_000


SMOKE = Sizes(
    decode_batches=(1, 4),
    decode_prompt=24,
    decode_steps=8,
    prefills=((1, 48), (4, 32)),
    mixed=(6, 4, 24),
    prefix=(4, 64, 8, 4),
    azure_rates=(8,),
    azure_s=0.5,
    trace_row=0,
    turns=((3, 3, 2),),
    turn_tokens=(40, 8, 4),
    reload=128,
    num_capped_blocks=64,
)
"""Small enough for a tiny model on a CPU."""


class Bench:
    """Takes figures of one model from one way of serving.

    Args:
        model: name of the model.
        serving: who answers.
        figures: where figures go.
        repeat: runs of each workload; a figure is their median.
        limit_s: time of one workload with all its runs; what is measured by then counts.
        trace: of the azure workloads; None: they cannot be measured. mooncake_trace: likewise.

    Attributes:
        suffix: put behind the names of workloads, for what is different about this way of serving.
        busy_s: seconds with a step at the executor, of every run that counts. What follows a step in the queue begins with its
            end, so the host's work counts only where it is seen.
    """

    def __init__(
        self,
        model: str,
        serving: Serving,
        figures: Figures,
        repeat: int,
        limit_s: float,
        sizes: Sizes,
        trace: Path | None = None,
        mooncake_trace: Path | None = None,
    ):
        self.sizes = sizes
        self.trace = trace
        self.mooncake_trace = mooncake_trace
        self.repeat = repeat
        self.model = model
        self._serving = serving
        self._figures = figures
        self._limit_s = limit_s
        self._deadline_s = 0.0
        self.peer = serving.peer
        self.suffix = ""
        self.busy_s: list[float] = []

    def start_limit(self) -> None:
        """The time of the next workload begins now."""
        self._deadline_s = time.monotonic() + self._limit_s
        self.busy_s = []

    def rounds(self) -> Iterator[int]:
        """0, 1, ... as often as asked for, fewer when the time is over."""
        for number in range(self.repeat):
            if number and time.monotonic() > self._deadline_s:
                return
            yield number

    def warm_up(self, workload: Workload) -> None:
        """One run that does not count."""
        if self.repeat > 1 or workload.num_prompt_tokens <= _WARM_UP_TOKENS:
            self._serving.run(workload, self._left_s())

    def run(self, workload: Workload, *, flush: bool = True) -> Run:
        """One run that counts, from an empty cache unless flush is False.

        Raises:
            RunError: see Serving.run.
        """
        if flush:
            self._serving.flush()
        before = self._serving.counters()
        return self._note(workload.name, self._serving.run(workload, self._left_s()), before)

    def run_turns(self, turns: Turns) -> Run:
        """Conversations, from an empty cache.

        Raises:
            RunError: see Serving.run_turns.
        """
        self._serving.flush()
        before = self._serving.counters()
        return self._note(turns.name, self._serving.run_turns(turns, self._left_s()), before)

    def _note(self, name: str, run: Run, before: Counters) -> Run:
        """Says how a run went."""
        steps = self._serving.counters().since(before)
        self.busy_s.append(steps.busy_s)
        cpu = "" if run.client_cpu is None else f"; busiest client {100 * run.client_cpu:.0f} % of a core"
        busy = f", executor busy {100 * steps.busy_s / run.total_s:.1f} %"
        print(
            f"# {self.model} {name} {self.peer}: {run.total_s:.3f} s, {run.num_output_tokens} tokens in "
            f"{steps.num_steps} steps{busy}, {steps.num_cached_tokens} tokens cached, {steps.num_preemptions} preemptions, "
            f"degraded: {steps.degraded or 'nothing'}{cpu}",
            file=sys.stderr,
            flush=True,
        )
        return run

    def add(self, workload: str, figure: str, values: list[float], unit: str) -> None:
        """Takes a figure in."""
        self._figures.add(f"{workload}{self.suffix}", figure, values, unit, self.peer, model=self.model)

    def _left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise RunError(f"the {self._limit_s:.0f} s of this workload are over")
        return left_s


def decode(bench: Bench, batch: int) -> None:
    """Milliseconds of a decode step: what 128 more tokens of every request cost."""
    sizes = bench.sizes
    bench.warm_up(workloads.decode(batch, 10, sizes.decode_prompt, 4))
    steps_ms: list[float] = []
    steady_ms: list[float] = []
    for number in bench.rounds():
        one = bench.run(workloads.decode(batch, 11 + 2 * number, sizes.decode_prompt, 1))
        all_ = bench.run(workloads.decode(batch, 12 + 2 * number, sizes.decode_prompt, 1 + sizes.decode_steps))
        steps_ms.append(1e3 * (all_.total_s - one.total_s) / sizes.decode_steps)
        # The request whose first token came last decodes while nothing is left to prefill.
        last = max(all_.answers, key=lambda answer: answer.first_s)
        steady_ms.append(1e3 * (last.last_s - last.first_s) / (last.num_tokens - 1))
    bench.add(f"decode {batch}", "step", steps_ms, "ms")
    bench.add(f"decode {batch}", "step after the last prefill", steady_ms, "ms")
    # Of the 128 steps alone, as above.
    more_s = [sizes.decode_steps * step_ms / 1e3 for step_ms in steps_ms]
    more_busy_s = [after - before for before, after in zip(bench.busy_s[::2], bench.busy_s[1::2], strict=True)]
    idle = [100 * (1 - busy / total) for busy, total in zip(more_busy_s, more_s, strict=True)]
    bench.add(f"decode {batch}", "executor idle", idle, "%")


def prefill(bench: Bench, batch: int, length: int) -> None:
    """Time to the only token of prompts of one length."""
    bench.warm_up(workloads.prefill(batch, length, 20))
    runs = [bench.run(workloads.prefill(batch, length, 21 + number)) for number in bench.rounds()]
    name = f"prefill {batch} x {length}"
    if batch == 1:
        bench.add(name, "ttft", [1e3 * run.first_token_s[0] for run in runs], "ms")
    bench.add(name, "prompt", [batch * length / run.total_s for run in runs], "tokens/s")


def mixed(bench: Bench) -> None:
    """Output tokens a second of many requests of all lengths at once."""
    num_requests, shortest, longest = bench.sizes.mixed
    bench.warm_up(workloads.mixed(100, num_requests, shortest, longest))
    runs = [bench.run(workloads.mixed(number, num_requests, shortest, longest)) for number in bench.rounds()]
    bench.add("mixed", "output", [run.num_output_tokens / run.total_s for run in runs], "tokens/s")
    if clients := [run.client_cpu for run in runs if run.client_cpu is not None]:
        bench.add("mixed", "busiest client, of a core", [100 * share for share in clients], "%")


def prefix(bench: Bench) -> None:
    """Seconds of requests that share a long prefix: cold, and the same requests again."""
    bench.warm_up(workloads.prefix(1, *bench.sizes.prefix))
    cold: list[float] = []
    again: list[float] = []
    for _ in bench.rounds():
        cold.append(bench.run(workloads.prefix(2, *bench.sizes.prefix)).total_s)
        again.append(bench.run(workloads.prefix(2, *bench.sizes.prefix), flush=False).total_s)
    bench.add("prefix", "cold", cold, "s")
    bench.add("prefix", "again", again, "s")


def azure(bench: Bench, rate: float) -> None:
    """Waiting times of users who come as a trace says."""
    if bench.trace is None:
        raise RunError("no trace: --trace names none")
    sizes = bench.sizes
    workload = workloads.azure(bench.trace, rate, first_row=sizes.trace_row, seconds=sizes.azure_s)
    runs = [bench.run(workload) for _ in bench.rounds()]
    for name, percent in (("p50", 50), ("p99", 99)):
        bench.add(workload.name, f"ttft {name}", [1e3 * percentile(run.first_token_s, percent) for run in runs], "ms")
        bench.add(workload.name, f"tpot {name}", [1e3 * percentile(run.per_token_s, percent) for run in runs], "ms")
    bench.add(workload.name, "output", [run.num_output_tokens / run.total_s for run in runs], "tokens/s")


def percentile(values: list[float], percent: int) -> float:
    """A percentile, linear between neighbours."""
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def cases(sizes: Sizes) -> dict[str, Callable[[Bench], None]]:
    """Everything that can be measured, by name, in the order of measuring."""
    found: dict[str, Callable[[Bench], None]] = {}
    for batch in sizes.decode_batches:
        found[f"decode {batch}"] = lambda bench, batch=batch: decode(bench, batch)  # type: ignore[misc]
    for batch, length in sizes.prefills:
        found[f"prefill {batch} x {length}"] = lambda bench, b=batch, n=length: prefill(bench, b, n)  # type: ignore[misc]
    found["mixed"] = mixed
    found["prefix"] = prefix
    for rate in sizes.azure_rates:
        found[f"azure {rate:g}"] = lambda bench, rate=rate: azure(bench, rate)  # type: ignore[misc]
    return found
