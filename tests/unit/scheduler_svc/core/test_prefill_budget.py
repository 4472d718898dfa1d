import pytest

from scheduler_svc.core.prefill_budget import (
    BACKLOG_STEPS,
    LEAST_CHUNK_TOKENS,
    LEAST_SHORT_TOKENS,
    LEAST_TOKENS,
    SHORT_STEP_S,
    TARGET_MARGIN,
    TIMES_ALL_ELSE,
    InProportion,
    WholeSteps,
)
from scheduler_svc.core.step_time import StepTimeModel, StepWork

MOST = 8192


def learned(base_s: float, per_token_s: float, per_decode_s: float, prefill_s: float = 0.0) -> StepTimeModel:
    model = StepTimeModel()
    for number in range(400):
        tokens, decodes = number % 7 * 600, 1 + number % 50
        work = StepWork(tokens, tokens * tokens // 2, decodes, decodes * 1000)
        model.learn(work, base_s + prefill_s * (tokens > 0) + per_token_s * tokens + per_decode_s * decodes)
    return model


def decodes(num: int) -> StepWork:
    return StepWork(num_decodes=num, num_context_tokens=num * 1000)


def test_prompts_take_so_many_times_as_long_as_all_else() -> None:
    budget = InProportion(learned(0.004, 20e-6, 100e-6), MOST)
    assert budget.num_tokens(decodes(60), 0) == pytest.approx(TIMES_ALL_ELSE * 0.010 / 20e-6, rel=0.1)


def test_a_device_that_is_slow_to_begin_with_prompts_gets_many_at_once() -> None:
    budget = InProportion(learned(0.001, 3e-6, 10e-6, prefill_s=0.012), MOST)
    assert budget.num_tokens(decodes(20), 0) == MOST


@pytest.mark.parametrize("num", [1, 20])
def test_few_decodes_leave_the_least(num: int) -> None:
    assert InProportion(learned(0.001, 20e-6, 100e-6), MOST).num_tokens(decodes(num), 0) == LEAST_TOKENS


def test_many_decodes_leave_the_whole_step() -> None:
    assert InProportion(learned(0.004, 20e-6, 100e-6), MOST).num_tokens(decodes(500), 0) == MOST


def test_when_many_prompts_wait_the_whole_step_is_used() -> None:
    budget = InProportion(learned(0.001, 20e-6, 100e-6), MOST)
    assert budget.num_tokens(decodes(20), BACKLOG_STEPS * MOST) == LEAST_TOKENS
    assert budget.num_tokens(decodes(20), BACKLOG_STEPS * MOST + 1) == MOST


def test_without_decodes_nobody_waits() -> None:
    assert InProportion(learned(0.004, 20e-6, 100e-6), MOST).num_tokens(StepWork(), 0) == MOST


def test_before_anything_is_known_the_whole_step_is_used() -> None:
    assert InProportion(StepTimeModel(), MOST).num_tokens(decodes(3), 0) == MOST


def test_prompts_that_seem_to_cost_nothing_use_the_whole_step() -> None:
    model = StepTimeModel()
    for _ in range(100):
        model.learn(decodes(8), 0.01)
    assert InProportion(model, MOST).num_tokens(decodes(8), 0) == MOST


def test_a_small_step_is_used_whole() -> None:
    assert InProportion(learned(0.004, 1e-3, 1e-3), 512).num_tokens(decodes(16), 0) == 512


def test_whole_steps_have_no_limit_of_their_own() -> None:
    assert WholeSteps().num_tokens(decodes(1000), 0) > 1 << 40


def test_a_chunk_is_as_long_as_the_target_between_tokens_allows() -> None:
    model = learned(0.004, 20e-6, 100e-6)
    budget = InProportion(model, MOST)
    work = decodes(60)
    num_tokens = budget.num_tokens_within(0.030, work, 0, 8000)
    assert num_tokens == pytest.approx((TARGET_MARGIN * 0.030 - 0.010) / 20e-6, rel=0.15)
    beside = StepWork(num_tokens, num_tokens**2 // 2, work.num_decodes, work.num_context_tokens)
    assert model.predict_s(beside) <= 0.030
    assert budget.num_tokens_within(0.030, beside, 0, 8000) == 0, "the next prompt waits for the next step"
    assert budget.num_tokens_within(1.0, work, 0, 8000) == 8000


def test_a_target_that_cannot_be_kept_stops_nobody() -> None:
    budget = InProportion(learned(0.004, 20e-6, 100e-6), MOST)
    assert budget.num_tokens_within(0.001, decodes(60), 0, 8000) == LEAST_CHUNK_TOKENS
    assert budget.num_tokens_within(0.001, decodes(60), 0, 7) == 7


def test_before_times_are_known_no_target_cuts_anything() -> None:
    assert InProportion(StepTimeModel(), MOST).num_tokens_within(0.001, decodes(60), 0, 8000) == 8000
    assert InProportion(StepTimeModel(), MOST).num_tokens_if_short(4.0, decodes(60), 0, 8000) == 8000


def test_a_short_step_is_a_few_times_as_long_as_an_empty_one() -> None:
    model = learned(0.004, 20e-6, 100e-6)
    work = decodes(60)
    num_tokens = InProportion(model, MOST).num_tokens_if_short(4.0, work, 0, 8000)
    beside = StepWork(num_tokens, num_tokens**2 // 2, work.num_decodes, work.num_context_tokens)
    assert model.predict_s(beside) == pytest.approx(TARGET_MARGIN * 4.0 * 0.004, rel=0.1)


def test_nobody_makes_steps_shorter_than_anybody_notices() -> None:
    model = learned(0.0005, 3e-6, 10e-6)
    num_tokens = InProportion(model, MOST).num_tokens_if_short(4.0, decodes(20), 0, 8000)
    assert num_tokens == pytest.approx((TARGET_MARGIN * SHORT_STEP_S - 0.0007) / 3e-6, rel=0.15)


def test_decodes_that_fill_a_short_step_leave_prompts_a_little() -> None:
    budget = InProportion(learned(0.004, 20e-6, 100e-6), MOST)
    assert budget.num_tokens_if_short(4.0, decodes(300), 0, 8000) == LEAST_SHORT_TOKENS
    assert budget.num_tokens_if_short(4.0, decodes(300), 0, 7) == 7
    beside = StepWork(LEAST_SHORT_TOKENS, LEAST_SHORT_TOKENS**2 // 2, 300, 300_000)
    assert budget.num_tokens_if_short(4.0, beside, 0, 8000) == 0, "once a step"
