"""The division of a GPU's memory: what is left becomes blocks, and what does not fit is refused with the settings to change."""

import dataclasses

import pytest

from common.errors import StartupError
from executor_svc.cuda.memory import MAX_BLOCKS, MemoryPlan

GIB = 1 << 30
PLAN = MemoryPlan(total=80 * GIB, used=16 * GIB, scratch=4 * GIB, graphs=2 * GIB)


def test_blocks_take_what_weights_scratch_and_graphs_leave_of_the_share() -> None:
    assert PLAN.num_blocks(2 << 20, 0.5, asked_blocks=0, asked_bytes=0) == (40 - 16 - 4 - 2) * 512


def test_settings_come_before_the_share() -> None:
    assert PLAN.num_blocks(2 << 20, 0.5, asked_blocks=0, asked_bytes=30 * GIB) == 30 * 512
    assert PLAN.num_blocks(2 << 20, 0.5, asked_blocks=7, asked_bytes=30 * GIB) == 7


def test_a_tiny_model_gets_no_pool_of_millions_of_blocks() -> None:
    assert PLAN.num_blocks(4096, 0.9, asked_blocks=0, asked_bytes=0) == MAX_BLOCKS


@pytest.mark.parametrize(
    ("utilization", "asked_blocks", "asked_bytes"),
    [(0.2, 0, 0), (0.9, 60 * 512, 0), (0.9, 0, 60 * GIB), (0.9, 0, 1000)],
)
def test_a_pool_that_does_not_fit_is_refused(utilization: float, asked_blocks: int, asked_bytes: int) -> None:
    with pytest.raises(StartupError, match="--gpu-memory-utilization"):
        PLAN.num_blocks(2 << 20, utilization, asked_blocks=asked_blocks, asked_bytes=asked_bytes)


def test_blocks_in_their_stored_form_are_taken_from_the_pool_and_named() -> None:
    plan = dataclasses.replace(PLAN, slots=GIB)

    assert plan.num_blocks(2 << 20, 0.5, asked_blocks=0, asked_bytes=0) == (40 - 16 - 4 - 2 - 1) * 512
    with pytest.raises(StartupError, match="blocks in their stored form 1,073,741,824;"):
        plan.num_blocks(2 << 20, 0.9, asked_blocks=0, asked_bytes=58 * GIB)
