import pytest

from scheduler_svc.core.run_ahead import COVERED_S, MAX_STEPS, RunAhead


@pytest.mark.parametrize("step_s, expected", [(1.0, 2), (COVERED_S, 2), (COVERED_S / 3.5, 4), (COVERED_S / 100, MAX_STEPS)])
def test_short_decode_steps_are_sent_further_ahead(step_s: float, expected: int) -> None:
    policy = RunAhead(2)
    policy.note_step(0, step_s)
    assert policy.num_steps(any_prefill=False) == expected


def test_nothing_piles_up_behind_a_prompt() -> None:
    policy = RunAhead(2)
    policy.note_step(0, 0.001)
    assert policy.num_steps(any_prefill=True) == 2


def test_before_anything_is_measured_the_least_is_allowed() -> None:
    policy = RunAhead(3)
    policy.note_step(512, 0.001)
    assert policy.num_steps(any_prefill=False) == 3


def test_it_follows_the_steps() -> None:
    policy = RunAhead(2)
    policy.note_step(0, 0.001)
    for _ in range(100):
        policy.note_step(0, 0.05)
    assert policy.num_steps(any_prefill=False) == 2
