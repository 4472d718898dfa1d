"""What every policy owes, whatever comes: room for urgent ones, no idle seat while somebody could run, no block given twice."""

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.policies.fair_share import FairShare
from scheduler_svc.core.policies.fcfs import Fcfs
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.policies.strict_priority import StrictPriority
from scheduler_svc.core.request import ServiceClass
from tests.unit.scheduler_svc.core.policies.machine import Machine, config, some_load

PATIENCE_S = {ServiceClass.INTERACTIVE: 1.0, ServiceClass.STANDARD: 3.0, ServiceClass.BATCH: 8.0}
POLICIES: list[Callable[[], Policy]] = [Fcfs, StrictPriority, lambda: FairShare(patience_s=PATIENCE_S, lead=40.0), FairShare]

policies = st.sampled_from(POLICIES)
seeds = st.integers(0, 2**32)


def check_room_for_urgent(machine: Machine) -> None:
    """Who is first does not wait for a seat or for blocks that a less urgent tier could give."""
    first = machine.policy.first()
    if first is None or machine.has_steps_in_flight(first):
        return
    victims = [s for s in machine.running() if s.tier > first.claim and not s.is_protected]
    if not victims:
        return
    num_others = len(machine.running()) - len(victims)
    num_free = machine.config.num_blocks - sum(len(s.table.block_ids) for s in machine.running())
    num_could_be_free = num_free + sum(len(s.table.block_ids) for s in victims)
    assert machine.num_blocks_needed(first) + num_others > num_could_be_free, f"{first.seq_id} waits, {victims} run"


def check_work_conserving(machine: Machine) -> None:
    """A seat and enough blocks are never left while somebody waits."""
    first = machine.policy.first()
    running = machine.running()
    if first is None or machine.has_steps_in_flight(first) or len(running) == machine.config.max_num_seqs:
        return
    num_free = machine.config.num_blocks - sum(len(s.table.block_ids) for s in running)
    assert machine.num_blocks_needed(first) + len(running) > num_free, f"{first.seq_id} could run"


def check_memory(machine: Machine) -> None:
    num_held = sum(len(sequence.table.block_ids) for sequence in machine.running())
    assert num_held <= machine.config.num_blocks
    assert len({block for s in machine.running() for block in s.table.block_ids}) == num_held, "a block is in two tables"
    machine.scheduler.check_integrity()


def check_order_of_preemption(machine: Machine) -> None:
    """Running sequences are in order of rank, and nobody waits who is in the batch."""
    ranks = [sequence.rank for sequence in machine.running()]
    assert ranks == sorted(ranks)


def run(machine: Machine, seed: int, num_steps: int, *checks: Callable[[Machine], None]) -> Machine:
    """Some load at up to three times what there is room for, then until all have ended."""
    rng = random.Random(seed)
    lanes = list(itertools.product("abc", ServiceClass))
    arrive = some_load(rng, lanes, {lane: rng.random() / 3 for lane in lanes})

    def inspect(machine: Machine) -> None:
        for check in checks:
            check(machine)

    machine.inspect = inspect
    for _ in range(num_steps):
        arrive(machine)
        machine.step()
    while machine.scheduler.has_work:
        assert machine.step() is not None, "nothing runs, and there is work"
        assert machine.num_steps < 100 * num_steps, "no end in sight"
    return machine


@given(policy=policies, seed=seeds, num_blocks=st.integers(8, 40))
@settings(max_examples=30)
def test_no_priority_inversion_on_seats_or_blocks(policy: Callable[[], Policy], seed: int, num_blocks: int) -> None:
    run(Machine(config(num_blocks=num_blocks), policy()), seed, 150, check_room_for_urgent, check_order_of_preemption)


@given(policy=policies, seed=seeds, num_blocks=st.integers(8, 40))
@settings(max_examples=30)
def test_work_conserving(policy: Callable[[], Policy], seed: int, num_blocks: int) -> None:
    run(Machine(config(num_blocks=num_blocks), policy()), seed, 150, check_work_conserving)


@given(policy=policies, seed=seeds, num_blocks=st.integers(8, 40), num_seqs=st.integers(1, 6), num_tokens=st.integers(6, 40))
@settings(max_examples=20)
def test_memory_is_never_over_committed_and_all_ends(
    policy: Callable[[], Policy], seed: int, num_blocks: int, num_seqs: int, num_tokens: int
) -> None:
    limits = config(num_blocks=num_blocks, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens, max_chunk_tokens=7)
    machine = run(Machine(limits, policy()), seed, 60, check_memory)
    stats = machine.scheduler.stats()
    assert (stats.num_used_blocks, stats.num_waiting_requests, stats.num_running_sequences) == (0, 0, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_inputs_give_the_same_plans(policy: Callable[[], Policy]) -> None:
    def plans() -> list[StepPlan]:
        found: list[StepPlan] = []
        machine = Machine(config(), policy())
        step = machine.scheduler.schedule
        machine.scheduler.schedule = lambda now_s: found.append(step(now_s)) or found[-1]  # type: ignore
        run(machine, 5, 200)
        return found

    assert plans() == plans()


@given(seed=seeds, num_blocks=st.integers(8, 40))
@settings(max_examples=15)
def test_fair_shares_of_one_tenant_in_one_class_are_first_come_first_served(seed: int, num_blocks: int) -> None:
    def plans(policy: Policy) -> list[StepPlan | None]:
        rng = random.Random(seed)
        machine = Machine(config(num_blocks=num_blocks), policy)
        found = []
        for _ in range(300):
            if rng.random() < 0.4:
                machine.add(rng.randint(1, 12), rng.randint(1, 16), "a", ServiceClass.STANDARD)
            found.append(machine.step())
        return found

    assert plans(FairShare()) == plans(Fcfs())


def test_a_preempted_sequence_keeps_its_place() -> None:
    machine = Machine(config(max_num_seqs=1, num_blocks=20), FairShare())
    machine.add(4, 20, "a", ServiceClass.BATCH)
    machine.step()
    machine.step()
    machine.add(4, 20, "a", ServiceClass.BATCH)
    machine.add(4, 2, "b", ServiceClass.INTERACTIVE)
    plan = machine.step()
    assert plan is not None
    assert [new.seq_id for new in plan.new_sequences] == [3], "the interactive one takes the seat"
    assert plan.dropped_seq_ids == (1,)
    assert [chunk.seq_id for chunk in plan.chunks] == [3], "the victim's token is not in the step any more"
    admitted = [new.seq_id for _ in range(3) if (plan := machine.step()) is not None for new in plan.new_sequences]
    assert admitted == [1], "not 2, which came later"
    assert machine.scheduler.stats().num_preemptions == 1
