"""Policies side by side on public traces, in virtual time: what each does to those who hurry, to the small, and to work.

    python -m bench.policy --trace azure_llm_2023_conv.csv [--policies fair,priority,fcfs] [--seconds 60]
                           [--cases classes,tenants,memory,overload] [--device h200-llama-8b] [--store]

    classes    interactive requests at 0.3 of the capacity beside batch at 1.2: TTFT p99 against alone, throughput against alone
    tenants    a tenant with a tenth of 1.5 times the capacity: TTFT p99 against alone
    memory     device blocks for a part of what runs: tokens computed again, against preempting who came last; with and without
               a store of blocks beside the device
    overload   requests in time a second at 1.5 times the capacity against at the capacity, where who would wait too long is
               refused, and where nobody is

The capacity is what the executor does of the trace while there is more than it can do. Times of steps are those of a profile.
Everything is seeded: a run again gives the same figures.
"""

import argparse
import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.policy_memory import LastComeCores
from bench.simulated_store import SimulatedStore, StoringExecutor
from scheduler_svc.core.policies.choice import POLICIES
from scheduler_svc.core.policies.fair_share import TTFT_TARGET_S
from scheduler_svc.core.request import ServiceClass
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.simulation.arrivals import Arrival, at_rate, part_of, read_arrivals
from scheduler_svc.simulation.outcome import Outcome, Served, percentile, ttfts
from scheduler_svc.simulation.profile import PROFILES, DeviceProfile
from scheduler_svc.simulation.run import Simulation

OVERLOAD = 1.5
INTERACTIVE_SHARE = 0.3
"""Of the capacity."""
SMALL_SHARE = 0.1
"""Of the load."""
TPOT_TARGET_S = 0.2
WAIT_SHARE = 0.8
"""Of the target for the first token: who is expected to wait longer is refused; the rest is for the own prompt."""
MEMORY_REQUESTS = 25
"""Device blocks are for so many of the trace's mean length."""
CAPACITY_TOKENS = 2_000_000
"""Of the requests that the capacity is measured with."""
UNBOUNDED = EngineConfig(max_waiting_requests=1 << 20, max_waiting_tokens=1 << 40)


@dataclass(frozen=True)
class Bench:
    """What all cases share.

    Attributes:
        trace: requests, in order; cases take as many as they need.
        capacity: requests a second.
        seconds: of arrivals.
        has_store: whether a store of blocks is beside the device.
    """

    trace: Sequence[Arrival]
    profile: DeviceProfile
    capacity: float
    seconds: float
    has_store: bool = False

    def arrivals(self, share: float, first: int, **changes: object) -> list[Arrival]:
        """A share of the capacity, from a place of the trace on; bursts are the trace's."""
        rate = share * self.capacity
        part = part_of(self.trace, first, max(2, round(rate * self.seconds)), 1 << 20)
        return [replace(one, **changes) for one in at_rate(part, rate)]  # type: ignore[arg-type]

    def run(self, arrivals: Sequence[Arrival], policy: str, **changes: object) -> Outcome:
        """A simulation of them in order of time."""
        ordered = sorted(arrivals, key=lambda one: one.at_s)
        simulation = Simulation(ordered, self.profile, policy=policy, config=UNBOUNDED)
        if self.has_store:
            simulation = replace(simulation, **_beside_store())  # type: ignore[arg-type]
        return replace(simulation, **changes).run()  # type: ignore[arg-type]

    def goodput(self, outcome: Outcome) -> float:
        """Requests a second that got their first token in time and the others fast enough."""
        return sum(map(_is_in_time, outcome.served)) / self.seconds

    def output_speed(self, served: Sequence[Served]) -> float:
        """Output tokens a second while requests came, a token of an unfinished request counted by its time."""
        return sum(_tokens_until(one, self.seconds) for one in served) / self.seconds


def classes(bench: Bench, policy: str) -> list[str]:
    """Those who hurry beside those who do not."""
    hurry = bench.arrivals(INTERACTIVE_SHARE, 0, service_class=ServiceClass.INTERACTIVE, tenant="people")
    batch = bench.arrivals(OVERLOAD - INTERACTIVE_SHARE, 1000, service_class=ServiceClass.BATCH, tenant="jobs")
    alone, batch_alone = bench.run(hurry, policy), bench.run(batch, policy)
    both = bench.run([*hurry, *batch], policy)
    of_hurry = both.of(lambda one: one.service_class is ServiceClass.INTERACTIVE)
    of_batch = both.of(lambda one: one.service_class is ServiceClass.BATCH)
    return [
        _against("interactive TTFT p99", 1e3 * _p99(of_hurry), 1e3 * _p99(alone.served), "ms", "alone"),
        _against("batch output", bench.output_speed(of_batch), bench.output_speed(batch_alone.served), "tokens/s", "alone"),
    ]


def tenants(bench: Bench, policy: str) -> list[str]:
    """A small tenant beside a big one of the same class."""
    small = bench.arrivals(OVERLOAD * SMALL_SHARE, 0, tenant="small")
    big = bench.arrivals(OVERLOAD * (1 - SMALL_SHARE), 1000, tenant="big")
    alone, both = bench.run(small, policy), bench.run([*small, *big], policy)
    of_small = both.of(lambda one: one.tenant == "small")
    return [_against("small tenant's TTFT p99", 1e3 * _p99(of_small), 1e3 * _p99(alone.served), "ms", "alone")]


def memory(bench: Bench, policy: str) -> list[str]:
    """Blocks for a part of what runs: those of one class who grow preempt each other, those who hurry preempt the others."""
    hurry = bench.arrivals(0.2, 0, service_class=ServiceClass.INTERACTIVE, tenant="people")
    batch = bench.arrivals(0.8, 1000, service_class=ServiceClass.BATCH, tenant="jobs")
    one_class = _recomputed(bench, policy, bench.arrivals(1.0, 0), "one class")
    return one_class + _recomputed(bench, policy, [*hurry, *batch], "interactive over batch")


def _recomputed(bench: Bench, policy: str, load: Sequence[Arrival], what: str) -> list[str]:
    mean_tokens = sum(one.num_prompt_tokens + one.num_output_tokens for one in load) / len(load)
    small = bench.profile.with_blocks(int(MEMORY_REQUESTS * mean_tokens / bench.profile.block_size))
    last = bench.run(load, policy, profile=small, cores=LastComeCores())
    last_stored = bench.run(load, policy, profile=small, cores=LastComeCores(), **_beside_store())
    ours = bench.run(load, policy, profile=small)
    stored = bench.run(load, policy, profile=small, **_beside_store())
    num_last, num_last_stored = last.num_recomputed_tokens, last_stored.num_recomputed_tokens
    return [
        _against("recomputed", ours.num_recomputed_tokens, num_last, "tokens", f"last come first; {what}"),
        _against("recomputed, with store", stored.num_recomputed_tokens, num_last, "tokens", "last come first without"),
        _against("recomputed, with store", stored.num_recomputed_tokens, num_last_stored, "tokens", "last come first with it"),
        f"    preemptions {ours.num_preemptions}, with store {stored.num_preemptions}; last come first {last.num_preemptions}, "
        f"{last_stored.num_preemptions}",
    ]


def _beside_store() -> dict[str, object]:
    """Changes of a simulation: with a new store."""
    store = SimulatedStore()
    return {"store": store, "executor": partial(StoringExecutor, store=store)}


def overload(bench: Bench, policy: str) -> list[str]:
    """Requests in time, of all that come."""
    bounded = replace(UNBOUNDED, max_wait_s=WAIT_SHARE * TTFT_TARGET_S[ServiceClass.STANDARD])
    at_capacity = bench.goodput(bench.run(bench.arrivals(1.0, 0), policy, config=bounded))
    lines = []
    for figure, config in (("goodput", bounded), ("goodput, none refused", UNBOUNDED)):
        over = bench.run(bench.arrivals(OVERLOAD, 0), policy, config=config)
        served = over.of(lambda one: True)
        num_refused = sum(bool(one.error) for one in served)
        lines += [
            _against(figure, bench.goodput(over), at_capacity, "requests/s", "at the capacity"),
            f"    {num_refused} of {len(served)} refused; TTFT p99 of the others {1e3 * _p99(served):.0f} ms",
        ]
    return lines


CASES: dict[str, Callable[[Bench, str], list[str]]] = {
    "classes": classes,
    "tenants": tenants,
    "memory": memory,
    "overload": overload,
}


def capacity_of(trace: Sequence[Arrival], profile: DeviceProfile) -> float:
    """Requests a second while more are there than it can do; those that end while the batch fills or empties do not count."""
    part = part_of(trace, 0, None, 1 << 20)
    num_tokens = itertools.accumulate(one.num_prompt_tokens + one.num_output_tokens for one in part)
    num_requests = sum(1 for total in num_tokens if total <= CAPACITY_TOKENS)
    at_once = [replace(one, at_s=0.0) for one in part[:num_requests]]
    outcome = Simulation(at_once, profile, policy="fcfs").run()
    ends = sorted(one.last_s for one in outcome.served if one.last_s is not None)
    first, last = int(0.3 * len(ends)), int(0.8 * len(ends))
    return (last - first) / (ends[last] - ends[first])


def main() -> int:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="Azure .csv or Mooncake .jsonl")
    parser.add_argument("--policies", default=",".join(POLICIES), help="to compare")
    parser.add_argument("--cases", default=",".join(CASES), help="to measure")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals, in virtual time")
    parser.add_argument("--device", default="h200-llama-8b", choices=sorted(PROFILES), help="whose times steps have")
    parser.add_argument("--store", action="store_true", help="with a store of blocks beside the device in all cases")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    profile = PROFILES[arguments.device]
    trace = read_arrivals(arguments.trace)
    capacity = capacity_of(trace, profile)
    print(f"{arguments.trace.name} on {profile.name}: {capacity:.1f} requests/s", flush=True)
    bench = Bench(trace, profile, capacity, arguments.seconds, arguments.store)
    for case in arguments.cases.split(","):
        for policy in arguments.policies.split(","):
            for line in CASES[case](bench, policy):
                print(f"{case:<9} {policy:<9} {line}", flush=True)
    return 0


def _p99(served: Sequence[Served]) -> float:
    return percentile(ttfts(served), 99)


def _is_in_time(one: Served) -> bool:
    """By the targets of its class."""
    if one.ttft_s is None or one.error:
        return False
    return one.ttft_s <= TTFT_TARGET_S[one.arrival.service_class] and (one.tpot_s or 0.0) <= TPOT_TARGET_S


def _tokens_until(one: Served, at_s: float) -> float:
    if one.first_s is None or one.last_s is None or one.first_s > at_s:
        return 0.0
    if one.last_s <= at_s:
        return one.num_tokens
    return one.num_tokens * (at_s - one.first_s) / (one.last_s - one.first_s)


def _against(figure: str, value: float, base: float, unit: str, of_what: str) -> str:
    ratio = f"{value / base:.2f}" if base else "-"
    return f"{figure:<24} {value:>9.1f} {unit:<11} {ratio:>6} x of {base:.1f} {of_what}"


if __name__ == "__main__":
    sys.exit(main())
