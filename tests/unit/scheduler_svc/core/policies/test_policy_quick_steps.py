"""Whose prompts make short steps for the sake of those who may come."""

from scheduler_svc.core.policies.fair_share import COMING_FOR_S, QUICK_STEP_S, FairShare
from scheduler_svc.core.request import ServiceClass
from tests.unit.scheduler_svc.core.policies.machine import Machine, config


def limits(machine: Machine) -> dict[str, float | None]:
    """By tenant, of those that run."""
    return {s.request.tenant: machine.policy.longest_step_s(s) for s in machine.running()}


def test_prompts_of_other_classes_while_interactive_requests_come() -> None:
    machine = Machine(config(), FairShare())
    machine.add(4, 16, "batch", ServiceClass.BATCH)
    machine.step()
    assert limits(machine) == {"batch": None}
    machine.add(4, 16, "chat", ServiceClass.INTERACTIVE)
    machine.step()
    assert limits(machine) == {"batch": QUICK_STEP_S, "chat": None}
    machine.now_s += COMING_FOR_S + 1.0
    machine.add(4, 16, "batch", ServiceClass.BATCH)
    machine.step()
    assert limits(machine)["batch"] is None


def test_prompts_of_a_tenant_with_a_backlog_while_a_tenant_without_one_comes() -> None:
    machine = Machine(config(max_num_seqs=2), FairShare())
    for _ in range(5):
        machine.add(4, 16, "big", ServiceClass.STANDARD)
    machine.step()
    assert limits(machine) == {"big": None}, "nobody else is there"
    machine.add(4, 16, "small", ServiceClass.STANDARD)
    assert limits(machine) == {"big": QUICK_STEP_S}
