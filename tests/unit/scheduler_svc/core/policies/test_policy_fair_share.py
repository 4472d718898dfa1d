"""The bounds that fair_share.py states, against books that the test keeps itself."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.policies.fair_share import BLOCK_SECOND, DECODED_TOKEN, FairShare, gap_bound
from scheduler_svc.core.policies.strict_priority import StrictPriority
from scheduler_svc.core.request import ServiceClass
from scheduler_svc.core.tenants import Tenants, TenantTerms
from tests.unit.scheduler_svc.core.policies.machine import Lane, Machine, config, some_load

MAX_PROMPT, MAX_OUTPUT = 12, 16
PATIENCE_S = {ServiceClass.INTERACTIVE: 1.0, ServiceClass.STANDARD: 3.0, ServiceClass.BATCH: 8.0}
LEAD = 40.0


def keep_backlogged(machine: Machine, lanes: list[Lane], rng: random.Random) -> None:
    for lane in lanes:
        while machine.waiting[lane] < 3:
            machine.add(rng.randint(1, MAX_PROMPT), rng.randint(1, MAX_OUTPUT), *lane)


def widest_gap(machine: Machine, lanes: list[Lane], weights: dict[str, float], since: dict[Lane, float]) -> float:
    """Of lanes of one class that all had somebody waiting since then, in service by weight."""
    served: dict[ServiceClass, list[float]] = {}
    for lane in lanes:
        served.setdefault(lane[1], []).append((machine.service[lane] - since[lane]) / weights[lane[0]])
    return max(max(values) - min(values) for values in served.values())


def check_gap(num_steps: int, weights: dict[str, float], classes: list[ServiceClass], seed: int) -> Machine:
    rng = random.Random(seed)
    tenants = Tenants({name: TenantTerms(weight) for name, weight in weights.items()})
    machine = Machine(config(), FairShare(tenants, patience_s=PATIENCE_S, lead=LEAD))
    lanes = list(itertools.product(weights, classes))
    for lane in lanes[1:]:  # others have a past of their own
        for _ in range(rng.randint(0, 5)):
            machine.add(rng.randint(1, MAX_PROMPT), rng.randint(1, MAX_OUTPUT), *lane)
    for _ in range(rng.randint(0, 40)):
        machine.step()
    keep_backlogged(machine, lanes, rng)
    since = {lane: machine.service[lane] for lane in lanes}
    for number in range(num_steps):
        keep_backlogged(machine, lanes, rng)
        machine.step()
        if number % 16 == 0:
            bound = gap_bound(
                MAX_PROMPT, MAX_OUTPUT, machine.config.max_num_seqs, machine.config.num_blocks, machine.longest_run_s,
                least_weight=min(weights.values()), lead=LEAD,
            )  # fmt: skip
            gap = widest_gap(machine, lanes, weights, since)
            assert gap <= bound, f"step {number}: gap {gap:.0f}, bound {bound:.0f}"
    return machine


def test_service_gap_stays_within_the_bound_over_100_000_steps() -> None:
    weights = {"a": 1.0, "b": 1.0, "c": 4.0}
    machine = check_gap(100_000, weights, [ServiceClass.INTERACTIVE, ServiceClass.BATCH], seed=3)
    assert machine.scheduler.stats().num_preemptions > 100
    served = {tenant: sum(machine.service[tenant, c] for c in ServiceClass) for tenant in weights}
    assert served["c"] / served["a"] == pytest.approx(4.0, rel=0.02)
    assert served["b"] / served["a"] == pytest.approx(1.0, rel=0.02)


@given(
    weights=st.lists(st.floats(0.25, 8.0), min_size=2, max_size=5),
    classes=st.sets(st.sampled_from(list(ServiceClass)), min_size=1).map(sorted),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25)
def test_service_gap_stays_within_the_bound(weights: list[float], classes: list[ServiceClass], seed: int) -> None:
    check_gap(600, {f"t{i}": weight for i, weight in enumerate(weights)}, classes, seed)


def longest_wait_s(
    machine: Machine, lanes: list[Lane], rates: dict[Lane, float], num_steps: int, rng: random.Random
) -> dict[Lane, float]:
    """By lane: longest time with somebody waiting and nobody admitted."""
    arrive = some_load(rng, lanes, rates)
    since: dict[Lane, float] = {}
    longest = dict.fromkeys(lanes, 0.0)
    for _ in range(num_steps):
        arrive(machine)
        before = dict(machine.waiting)
        for lane in lanes:
            if before.get(lane):
                since.setdefault(lane, machine.now_s)
            else:
                since.pop(lane, None)
        started_s = machine.now_s
        plan = machine.step()
        assert plan is not None or not any(before.values())
        for lane in lanes:
            if lane in since:
                longest[lane] = max(longest[lane], started_s - since[lane])
                if machine.waiting[lane] < before[lane]:
                    since[lane] = started_s
    return longest


@given(num_tenants=st.integers(1, 4), overload=st.floats(0.5, 6.0), seed=st.integers(0, 2**32))
@settings(max_examples=20)
def test_nobody_waits_above_w_whatever_others_do(num_tenants: int, overload: float, seed: int) -> None:
    rng = random.Random(seed)
    lanes = list(itertools.product([f"t{i}" for i in range(num_tenants)], ServiceClass))
    rates = {lane: rng.random() * overload / len(lanes) for lane in lanes}
    policy = FairShare(patience_s=PATIENCE_S, lead=10**9)
    machine = Machine(config(), policy)
    longest = longest_wait_s(machine, lanes, rates, 1500, rng)
    num_turns = 2 + -(-len(lanes) // machine.config.max_num_seqs)
    for lane, wait_s in longest.items():
        bound_s = PATIENCE_S[lane[1]] + num_turns * machine.longest_stay_s
        assert wait_s <= bound_s, f"{lane} waited {wait_s:.1f} s, W is {bound_s:.1f} s"


def test_without_ageing_the_same_load_starves() -> None:
    lanes = [("a", ServiceClass.INTERACTIVE), ("b", ServiceClass.BATCH)]
    rates = {lanes[0]: 0.9, lanes[1]: 0.1}
    starved = longest_wait_s(Machine(config(), StrictPriority()), lanes, rates, 3000, random.Random(1))
    aged = longest_wait_s(Machine(config(), FairShare(patience_s=PATIENCE_S)), lanes, rates, 3000, random.Random(1))
    assert starved["b", ServiceClass.BATCH] > 100.0
    assert aged["b", ServiceClass.BATCH] < 12.0


def test_an_idle_tenant_saves_up_no_claim() -> None:
    machine = Machine(config(), FairShare(patience_s=PATIENCE_S, lead=LEAD))
    rng = random.Random(1)
    busy, idle = ("busy", ServiceClass.STANDARD), ("idle", ServiceClass.STANDARD)
    for _ in range(2000):
        keep_backlogged(machine, [busy], rng)
        machine.step()
    before = machine.service[busy]
    for _ in range(2000):
        keep_backlogged(machine, [busy, idle], rng)
        machine.step()
    assert machine.service[busy] - before == pytest.approx(machine.service[idle], rel=0.1)


def test_cached_tokens_are_cheap_and_weights_divide() -> None:
    assert DECODED_TOKEN > 1.0 > 0.0 < BLOCK_SECOND
    assert gap_bound(10, 5, 4, 0, 0.0, lead=0.0) == 2 * (10 + 4 * 2 * 5)
