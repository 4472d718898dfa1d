"""KV memory under the trace's lengths: how much of the used blocks is empty, and how many requests fit.

    python -m bench.kv_waste azure_llm_2023_conv.csv [--num-blocks 16384] [--num-requests 2000]

The scheduler's core runs for real, with its block pool, its admissions and its preemptions, always with more requests waiting
than fit. Only the model is left out: every next token is the same, and each request gets as many as the trace says. The other
side is what serving without paging does: one contiguous region of the maximum length for each request.
"""

import argparse
import csv
import itertools
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figures
from common.block_hash import root_key
from common.ids import RequestId
from scheduler_svc.core.request import Request, SamplingParams, StopConditions
from scheduler_svc.core.scheduler import Scheduler, SchedulerConfig


@dataclass(frozen=True)
class TraceRequest:
    """Lengths of one request, in tokens."""

    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class KvWaste:
    """What was measured while the pool was full; means are over steps.

    Attributes:
        num_requests: requests that ran.
        num_steps: steps with requests waiting.
        waste_ratio: mean share of the slots of used blocks that hold no token.
        max_waste_ratio: in the worst step.
        num_running: mean number of requests in the batch.
        num_contiguous: requests that fit when each reserves the maximum length.
        used_ratio: mean share of the pool's blocks in use.
        num_blocks_per_run: mean length of the runs of neighbouring blocks that a request's table consists of, at its end.
        num_preemptions: all in all.
    """

    num_requests: int
    num_steps: int
    waste_ratio: float
    max_waste_ratio: float
    num_running: float
    num_contiguous: int
    used_ratio: float
    num_blocks_per_run: float
    num_preemptions: int

    @property
    def gain(self) -> float:
        """Requests that fit, over those of contiguous reservation."""
        return self.num_running / max(1, self.num_contiguous)


def read_trace(path: Path, max_model_len: int, num_requests: int) -> list[TraceRequest]:
    """The first requests of an Azure LLM trace that fit a model's context and yield a token."""
    with path.open(newline="") as file:
        lengths = (TraceRequest(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file))
        fitting = (
            request
            for request in lengths
            if request.num_prompt_tokens > 0
            and request.num_output_tokens > 0
            and request.num_prompt_tokens + request.num_output_tokens <= max_model_len
        )
        return [request for request, _ in zip(fitting, range(num_requests), strict=False)]


def measure_kv_waste(trace: list[TraceRequest], num_blocks: int, block_size: int, max_model_len: int) -> KvWaste:
    """Runs the trace's requests, all there from the start."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=4096,
            max_num_batched_tokens=16384,
            max_chunk_tokens=8192,
            max_waiting_requests=len(trace),
            max_waiting_tokens=1 << 40,
            prefix_caching=False,  # the trace has lengths only: nothing is shared
        )
    )
    root = root_key(bytes(32))
    for i, lengths in enumerate(trace):
        stop = StopConditions(max_tokens=lengths.num_output_tokens)
        prompt = (0,) * lengths.num_prompt_tokens
        scheduler.add(Request(RequestId(str(i)), prompt, SamplingParams(), stop, root, arrival_s=0.0))
    waste: list[float] = []
    running: list[int] = []
    used: list[float] = []
    tables: dict[int, list[int]] = {}
    num_run_blocks = num_runs = 0
    while (plan := scheduler.schedule(0.0)) is not None:
        stats = scheduler.stats()
        if stats.num_waiting_requests:
            waste.append(stats.kv_waste_ratio)
            running.append(stats.num_running_sequences)
            used.append(stats.num_used_blocks / stats.num_blocks)
        for new in plan.new_sequences:
            tables[new.seq_id] = list(new.block_ids)
        for chunk in plan.chunks:
            tables[chunk.seq_id] += chunk.new_block_ids
        # A prompt in chunks draws no token before its last one; the scheduler ignores tokens that it did not ask for.
        sampled = {chunk.seq_id: 1 for chunk in plan.chunks}
        for update in scheduler.apply(plan.step_id, sampled, {}):
            if update.finish_reason is not None:
                table = tables.pop(update.seq_id)
                num_run_blocks += len(table)
                num_runs += 1 + sum(second != first + 1 for first, second in itertools.pairwise(table))
    scheduler.check_integrity()
    return KvWaste(
        num_requests=len(trace),
        num_steps=len(waste),
        waste_ratio=sum(waste) / max(1, len(waste)),
        max_waste_ratio=max(waste, default=0.0),
        num_running=sum(running) / max(1, len(running)),
        num_contiguous=num_blocks * block_size // max_model_len,
        used_ratio=sum(used) / max(1, len(used)),
        num_blocks_per_run=num_run_blocks / max(1, num_runs),
        num_preemptions=scheduler.stats().num_preemptions,
    )


def report(figures: Figures, waste: KvWaste) -> None:
    """Adds the measured values to figures."""
    name = "kv-waste"
    figures.add(name, "empty slots of used blocks", 100 * waste.waste_ratio, "%", "octavo")
    figures.add(name, "empty slots, worst step", 100 * waste.max_waste_ratio, "%", "octavo")
    figures.add(name, "blocks in use", 100 * waste.used_ratio, "%", "octavo")
    figures.add(name, "requests that fit", waste.num_running, "requests", "octavo")
    figures.add(name, "requests that fit", float(waste.num_contiguous), "requests", "contiguous")
    figures.add(name, "requests that fit, ratio", waste.gain, "times", "octavo")
    figures.add(name, "neighbouring blocks", waste.num_blocks_per_run, "blocks", "octavo")
    figures.add(name, "preemptions", waste.num_preemptions / waste.num_requests, "per request", "octavo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="CSV with ContextTokens and GeneratedTokens")
    parser.add_argument("--num-blocks", type=int, default=16384, help="blocks of the device pool")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument("--max-model-len", type=int, default=8192, help="the model's context: what contiguous serving reserves")
    parser.add_argument("--num-requests", type=int, default=2000, help="the trace's first so many")
    args = parser.parse_args()
    figures = Figures()
    trace = read_trace(args.trace, args.max_model_len, args.num_requests)
    report(figures, measure_kv_waste(trace, args.num_blocks, args.block_size, args.max_model_len))
    figures.print_table()


if __name__ == "__main__":
    main()
