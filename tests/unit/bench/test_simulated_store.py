"""Executors with a store beside them, in virtual time: what was preempted comes back from there."""

from collections.abc import Callable
from functools import partial

from bench.simulated_store import SimulatedStore, StoringExecutor
from scheduler_svc.core.request import ServiceClass
from scheduler_svc.simulation.arrivals import Arrival
from scheduler_svc.simulation.outcome import Outcome
from scheduler_svc.simulation.profile import PROFILES
from scheduler_svc.simulation.run import Simulation

PROFILE = PROFILES["h200-llama-8b"].with_blocks(600)


def make_prompt(token: int, num_tokens: int) -> Callable[[], tuple[int, ...]]:
    return lambda: (token,) * num_tokens


def arrivals() -> list[Arrival]:
    """Eight long ones that can wait and fill the device, then one every half second that cannot."""
    patient = [Arrival(0.1 * i, 900, 900, make_prompt(i, 900), "jobs", ServiceClass.BATCH) for i in range(8)]
    urgent = [Arrival(2.0 + 0.5 * i, 3000, 5, make_prompt(99 + i, 3000), "chat", ServiceClass.INTERACTIVE) for i in range(6)]
    return patient + urgent


def check_all_served(outcome: Outcome) -> None:
    assert [(one.error, one.num_tokens) for one in outcome.served] == [("", one.num_output_tokens) for one in arrivals()]
    assert outcome.num_preemptions > 3


def test_what_was_preempted_is_loaded_and_hardly_anything_is_computed_again() -> None:
    store = SimulatedStore()
    stored = Simulation(arrivals(), PROFILE, store=store, executor=partial(StoringExecutor, store=store)).run()
    plain = Simulation(arrivals(), PROFILE).run()
    check_all_served(stored)
    check_all_served(plain)
    assert store.num_loaded > 20
    assert stored.num_recomputed_tokens < plain.num_recomputed_tokens / 2
