"""Whose prompts make short steps for the sake of those who may come."""

from scheduler_svc.core.policies.fair_share import BACKLOG_STEP, BATCH_STEP, COMING_FOR_S, FairShare
from scheduler_svc.core.request import ServiceClass
from tests.unit.scheduler_svc.core.policies.machine import Machine, config

LEAD = 16.0
"""Eight prompt tokens that wait are a backlog."""


def longest(machine: Machine) -> dict[str, float | None]:
    """By tenant, of those that run."""
    return {s.request.tenant: machine.policy.longest_step(s) for s in machine.running()}


def test_prompts_of_batch_while_interactive_requests_come() -> None:
    machine = Machine(config(), FairShare())
    machine.add(4, 16, "batch", ServiceClass.BATCH)
    machine.step()
    assert longest(machine) == {"batch": None}
    machine.add(4, 16, "chat", ServiceClass.INTERACTIVE)
    machine.step()
    assert longest(machine) == {"batch": BATCH_STEP, "chat": None}
    machine.now_s += COMING_FOR_S + 1.0
    machine.add(4, 16, "batch", ServiceClass.BATCH)
    machine.step()
    assert longest(machine)["batch"] is None


def test_prompts_of_a_tenant_with_a_backlog_while_a_tenant_without_one_comes() -> None:
    machine = Machine(config(max_num_seqs=2), FairShare(lead=LEAD))
    for _ in range(5):
        machine.add(4, 16, "big", ServiceClass.STANDARD)
    machine.step()
    assert longest(machine) == {"big": None}, "nobody else is there"
    machine.add(4, 16, "small", ServiceClass.STANDARD)
    assert longest(machine) == {"big": BACKLOG_STEP}


def test_prompts_of_standard_while_interactive_requests_come_if_there_is_a_backlog() -> None:
    machine = Machine(config(max_num_seqs=2), FairShare(lead=LEAD))
    machine.add(4, 16, "chat", ServiceClass.INTERACTIVE)
    for _ in range(3):
        machine.add(4, 16, "work", ServiceClass.STANDARD)
    machine.step()
    assert longest(machine) == {"chat": None, "work": None}, "a burst of a moment"
    machine.add(4, 16, "work", ServiceClass.STANDARD)
    assert longest(machine) == {"chat": None, "work": BACKLOG_STEP}


def test_whoever_was_overdue_has_given_way_for_long_enough() -> None:
    patience_s = dict.fromkeys(ServiceClass, 0.5)
    machine = Machine(config(max_num_seqs=1), FairShare(patience_s=patience_s))
    machine.add(4, 4, "chat", ServiceClass.INTERACTIVE)
    machine.step()
    machine.now_s += 1.0
    machine.add(4, 16, "batch", ServiceClass.BATCH)
    machine.now_s += 1.0
    machine.add(4, 4, "chat", ServiceClass.INTERACTIVE)
    while not any(s.request.tenant == "batch" for s in machine.running()):
        machine.step()
    assert longest(machine) == {"batch": None}


def test_tenants_without_a_backlog_are_remembered_though_one_with_a_backlog_had_none_for_a_moment() -> None:
    machine = Machine(config(max_num_seqs=2), FairShare(lead=LEAD))
    machine.add(4, 16, "small", ServiceClass.STANDARD)
    machine.step()
    for _ in range(5):
        machine.add(4, 16, "big", ServiceClass.STANDARD)
    machine.step()
    assert longest(machine) == {"big": BACKLOG_STEP, "small": None}


def test_batch_decodes_step_aside_for_interactive_prompts_in_every_other_step_at_most() -> None:
    machine = Machine(config(num_blocks=100, max_num_seqs=100, max_chunk_tokens=8), FairShare())
    machine.add(4, 40, "batch", ServiceClass.BATCH)
    machine.add(4, 40, "other", ServiceClass.STANDARD)
    machine.step()
    machine.add(40, 2, "chat", ServiceClass.INTERACTIVE)
    decoding = []
    for _ in range(5):
        plan = machine.step()
        assert plan is not None
        decoding.append({chunk.seq_id for chunk in plan.chunks if chunk.num_tokens == 1})
    assert decoding == [{2}, {1, 2}, {2}, {1, 2}, {2}], "1 is the batch's"
    plan = machine.step()
    assert plan is not None and len(plan.chunks) == 3
    machine.scheduler.check_integrity()
