"""Many chats that come back at once, in virtual time: whose blocks are in memory, nobody computes."""

import asyncio
from dataclasses import replace

import pytest

from bench import turns_simulated, workloads
from scheduler_svc.simulation.profile import PROFILES
from scheduler_svc.simulation.virtual_time import VirtualTimeLoop

USERS, IN_FLIGHT, TURNS, BLOCK = 24, 6, 3, 16
PROFILE = replace(PROFILES["h200-llama-8b"], num_blocks=3600)
"""A device that has room for those that run, and not for one round of all histories."""


def figures(load_bytes_per_s: float, save_bytes_per_s: float) -> dict[str, float | str]:
    turns = workloads.turns(USERS, TURNS, IN_FLIGHT, num_first=4096, num_new=512, num_output=128)
    speed = turns_simulated.StoreSpeed("", load_bytes_per_s, save_bytes_per_s)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(turns_simulated.run(turns, PROFILE, speed))


@pytest.mark.parametrize("load_bytes_per_s", [28.7e9, 50e9])
def test_all_histories_are_loaded_when_that_is_much_faster(load_bytes_per_s: float) -> None:
    found = figures(load_bytes_per_s, 18e9)

    histories = [4096 + 128 + turn * (512 + 128) for turn in range(TURNS - 1)]
    in_full_blocks = sum((history - 1) // BLOCK * BLOCK for history in histories)
    assert float(found["from shm"]) + float(found["of them from device"]) >= 0.98 * USERS * in_full_blocks


def test_loads_that_take_nearly_as_long_as_computing_hold_nobody_up_for_all_of_them() -> None:
    slow, none = figures(5e9, 5e9), figures(0.0, 1e9)

    for figure in ("total s", "later first token ms, mean"):
        assert float(slow[figure]) <= 1.05 * float(none[figure])
