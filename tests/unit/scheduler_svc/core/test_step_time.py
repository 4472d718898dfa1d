import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.step_time import StepTimeModel, StepWork


def decode(num: int, context: int) -> StepWork:
    return StepWork(num_decodes=num, num_context_tokens=num * context)


def prefill(num_tokens: int, before: int = 0) -> StepWork:
    return StepWork(num_tokens, num_tokens * before + num_tokens * num_tokens // 2)


def time_of(work: StepWork) -> float:
    """A GPU's step, about."""
    return (
        0.005 + 20e-6 * work.num_prefill_tokens + 1e-9 * work.num_attended + 1e-5 * work.num_decodes
        + 3e-8 * work.num_context_tokens
    )  # fmt: skip


def test_times_are_predicted_from_those_that_were() -> None:
    model, rng = StepTimeModel(), random.Random(1)
    for _ in range(300):
        work = decode(rng.randint(1, 256), rng.randint(10, 2000)) if rng.random() < 0.7 else prefill(rng.randint(10, 8192))
        model.learn(work, time_of(work) * rng.uniform(0.97, 1.03))
    for work in (decode(64, 1000), prefill(4000), prefill(8192, 8192)):
        assert model.predict_s(work) == pytest.approx(time_of(work), rel=0.1)
    assert model.relative_error < 0.05


def test_long_decoding_does_not_forget_what_prompts_cost() -> None:
    model = StepTimeModel()
    for number in range(100):
        model.learn(prefill(100 * (1 + number % 40)), time_of(prefill(100 * (1 + number % 40))))
    for number in range(5000):
        model.learn(decode(1 + number % 64, 500), time_of(decode(1 + number % 64, 500)))
    assert model.predict_s(prefill(3000)) == pytest.approx(time_of(prefill(3000)), rel=0.2)


def test_it_follows_a_device_that_became_slower() -> None:
    model = StepTimeModel()
    for _ in range(200):
        model.learn(decode(8, 100), 0.005)
    for _ in range(200):
        model.learn(decode(8, 100), 0.010)
    assert model.predict_s(decode(8, 100)) == pytest.approx(0.010, rel=0.05)


def test_one_step_that_took_a_second_is_not_the_rule() -> None:
    model = StepTimeModel()
    for _ in range(200):
        model.learn(decode(8, 100), 0.005)
    model.learn(decode(8, 100), 1.0)
    model.learn(decode(8, 100), 0.005)
    assert model.predict_s(decode(8, 100)) < 0.02


def test_before_anything_is_known_nothing_is_predicted() -> None:
    assert StepTimeModel().predict_s(decode(8, 100)) == 0.0


def test_a_time_of_nothing_teaches_nothing() -> None:
    model = StepTimeModel()
    model.learn(decode(1, 1), 0.0)
    assert model.num_measured == 0


works = st.builds(StepWork, st.integers(0, 65536), st.integers(0, 1 << 32), st.integers(0, 4096), st.integers(0, 1 << 26))


@given(st.lists(st.tuples(works, st.floats(1e-5, 10.0)), max_size=50), works)
def test_predictions_stay_numbers(steps: list[tuple[StepWork, float]], work: StepWork) -> None:
    model = StepTimeModel()
    for step, seconds in steps:
        model.learn(step, seconds)
    assert 0.0 <= model.predict_s(work) < float("inf")
    assert 0.0 <= model.relative_error <= 1.0
