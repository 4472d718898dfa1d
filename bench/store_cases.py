"""What is measured where the device's pool is too small for all that is worth keeping, with a block store and without one.

Knows workloads and figures; not how they are served.
"""

import statistics
from collections.abc import Callable

from bench import workloads
from bench.clients import RunError
from bench.gpu_cases import Bench, Sizes, percentile

_NUM_OTHERS = 12


def turns(bench: Bench, num_users: int, num_turns: int, num_in_flight: int) -> None:
    """Users who come back: seconds of all, and how long they wait in later turns."""
    total: list[float] = []
    mean: list[float] = []
    p99: list[float] = []
    conversations = workloads.turns(num_users, num_turns, num_in_flight, *bench.sizes.turn_tokens)
    for _ in bench.rounds():
        run = bench.run_turns(conversations)
        later_ms = [1e3 * seconds for seconds in run.first_token_s[num_users:]]
        total.append(run.total_s)
        mean.append(statistics.fmean(later_ms))
        p99.append(percentile(later_ms, 99))
    bench.add(conversations.name, "total", total, "s")
    bench.add(conversations.name, "later ttft mean", mean, "ms")
    bench.add(conversations.name, "later ttft p99", p99, "ms")


def reload(bench: Bench, num_tokens: int) -> None:
    """Time to first token of a long prompt: cold, with its KV on the device, and after others took its place there."""
    found: dict[str, list[float]] = {"cold": [], "device hit": [], "after eviction": []}
    prompt = workloads.prefill(1, num_tokens, 900)
    for _ in bench.rounds():
        found["cold"].append(1e3 * bench.run(prompt).first_token_s[0])
        found["device hit"].append(1e3 * bench.run(prompt, flush=False).first_token_s[0])
        for other in range(_NUM_OTHERS):
            bench.run(workloads.prefill(1, num_tokens, 1000 + other), flush=False)
        found["after eviction"].append(1e3 * bench.run(prompt, flush=False).first_token_s[0])
    for figure, values in found.items():
        bench.add(f"reload {num_tokens}", figure, values, "ms")


def mooncake(bench: Bench, num_requests: int, speed: float) -> None:
    """Conversations that share beginnings, as a trace has them."""
    if bench.mooncake_trace is None:
        raise RunError("no trace: --mooncake-trace names none")
    workload = workloads.mooncake(bench.mooncake_trace, num_requests, speed)
    runs = [bench.run(workload) for _ in bench.rounds()]
    bench.add(workload.name, "total", [run.total_s for run in runs], "s")
    for name, percent in (("p50", 50), ("p99", 99)):
        bench.add(workload.name, f"ttft {name}", [1e3 * percentile(run.first_token_s, percent) for run in runs], "ms")


def store_cases(sizes: Sizes) -> dict[str, Callable[[Bench], None]]:
    """By name, in the order of measuring."""
    found: dict[str, Callable[[Bench], None]] = {}
    for users, rounds, in_flight in sizes.turns:
        found[f"turns {users}:{rounds}:{in_flight}"] = lambda b, u=users, t=rounds, f=in_flight: turns(b, u, t, f)  # type: ignore[misc]
    found[f"reload {sizes.reload}"] = lambda bench: reload(bench, sizes.reload)
    found[f"mooncake {sizes.mooncake[0]} x {sizes.mooncake[1]:g}"] = lambda bench: mooncake(bench, *sizes.mooncake)
    return found
