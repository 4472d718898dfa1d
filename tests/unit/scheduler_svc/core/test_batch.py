"""What a step has room for, and what it says of its work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.batch import Batch
from scheduler_svc.core.step_time import StepWork
from tests.unit.scheduler_svc.core.rig import Rig, make_config


@pytest.mark.parametrize(("num_tokens", "room"), [(3, 3), (10, 10), (11, 10)])
def test_without_a_preference_a_prompt_is_cut_to_what_is_left(num_tokens: int, room: int) -> None:
    assert Batch(1, 10).room_for(num_tokens) == room


@pytest.mark.parametrize(("num_tokens", "room"), [(3, 3), (4, 4), (5, 5), (10, 10), (11, 4)])
def test_the_first_prompt_goes_whole_or_in_a_piece_of_the_preferred_size(num_tokens: int, room: int) -> None:
    batch = Batch(1, 10)
    batch.prefer(4)
    assert batch.room_for(num_tokens) == room


@given(st.integers(1, 100), st.integers(1, 200), st.integers(1, 300))
def test_there_is_never_room_for_more_than_the_step_has(step: int, preferred: int, num_tokens: int) -> None:
    batch = Batch(1, step)
    batch.prefer(preferred)
    assert 0 < batch.room_for(num_tokens) <= min(step, num_tokens)


def test_a_plan_says_what_its_step_computes() -> None:
    rig = Rig(make_config(max_chunk_tokens=8))
    rig.add([1] * 5, max_tokens=4)
    first = rig.schedule()
    assert first is not None and first.work == StepWork(num_prefill_tokens=5, num_attended=15)
    rig.add([2] * 12, max_tokens=4)
    second, third = rig.schedule(), rig.schedule()
    assert second is not None and second.work == StepWork(8, 36, num_decodes=1, num_context_tokens=6)
    assert third is not None and third.work == StepWork(4, 4 * 8 + 10, num_decodes=1, num_context_tokens=7)
    rig.wind_up()
