import itertools
from dataclasses import replace

import pytest

from scheduler_svc.core.forecast.capacity import Demand, ExecutorCapacity, desired_executors, measured_capacity
from scheduler_svc.core.forecast.wait import Backlog, WaitForecast
from scheduler_svc.core.step_time import StepTimeModel, StepWork

IDLE = Backlog(
    num_prompt_tokens=0, num_waiting=0, num_running=0, num_seats=8, num_blocks=1000, num_used_blocks=0, block_size=16,
    num_output_tokens=100.0,
)  # fmt: skip
BUSY = replace(IDLE, num_running=8, num_used_blocks=400)


def step_s(work: StepWork) -> float:
    """A made-up executor: 5 ms a step, 20 us a prompt token, 0.5 ms a decode, 0.2 us a key."""
    return 0.005 + 20e-6 * work.num_prefill_tokens + 5e-4 * work.num_decodes + 2e-7 * work.num_context_tokens


def learned() -> StepTimeModel:
    model = StepTimeModel()
    for _ in range(8):
        for num_prefill, num_decodes, num_context in itertools.product((0, 300, 512), (0, 2, 8), (100, 2000, 6000)):
            context = num_context if num_decodes else 0
            work = StepWork(num_prefill, num_prefill * num_prefill // 2, num_decodes, context)
            model.learn(work, step_s(work))
    return model


@pytest.fixture
def waits() -> WaitForecast:
    return WaitForecast(learned(), 512)


def test_nothing_is_expected_before_steps_were_seen() -> None:
    waits = WaitForecast(StepTimeModel(), 512)
    assert not waits.is_known
    assert waits.expected_wait_s(BUSY, 1000) == 0


def test_an_idle_executor_begins_at_once(waits: WaitForecast) -> None:
    assert waits.expected_wait_s(IDLE, 1000) == 0
    expected_s = 2 * (0.005 + 20e-6 * 512) + 100 * 0.0055
    assert waits.expected_finish_s(IDLE, 1024, 0, 100) == pytest.approx(expected_s, rel=0.15)


def test_prompts_that_come_before_are_waited_for(waits: WaitForecast) -> None:
    wait_s = waits.expected_wait_s(replace(IDLE, num_prompt_tokens=5120, num_waiting=3), 100)
    assert wait_s == pytest.approx(10 * (0.005 + 20e-6 * 512), rel=0.1)


def test_a_full_batch_is_waited_for_until_somebody_ends(waits: WaitForecast) -> None:
    turnover_s = 100 * waits.token_s(BUSY)
    assert waits.expected_wait_s(BUSY, 100) == pytest.approx(turnover_s / 8)
    assert waits.expected_wait_s(replace(BUSY, num_waiting=7, num_prompt_tokens=7), 100) == pytest.approx(turnover_s, rel=0.05)
    assert waits.expected_wait_s(replace(BUSY, num_running=7), 100) == 0


def test_blocks_are_waited_for_in_proportion_to_those_that_come_back(waits: WaitForecast) -> None:
    full = replace(BUSY, num_running=4, num_used_blocks=1000)
    wait_s = waits.expected_wait_s(full, 800)
    assert wait_s == pytest.approx(100 * waits.token_s(full) * 50 / 1000)
    assert waits.expected_wait_s(replace(full, num_used_blocks=950), 800) == 0


def test_steps_that_let_sequences_end_do_not_compute_the_prompts_that_come_before(waits: WaitForecast) -> None:
    queue = replace(BUSY, num_waiting=7, num_prompt_tokens=5120)
    prompts_s = waits.expected_wait_s(replace(queue, num_running=0, num_waiting=0, num_used_blocks=0), 100)
    assert waits.expected_wait_s(queue, 100) > prompts_s + 100 * waits.token_s(queue) * 0.99


def test_a_cached_prefix_saves_its_computation_and_not_more(waits: WaitForecast) -> None:
    cold_s, warm_s = (waits.expected_finish_s(IDLE, 1024, cached, 100) for cached in (0, 1008))
    assert cold_s - warm_s == pytest.approx(0.005 + 20e-6 * 1008, rel=0.25)
    slower_by_s = waits.expected_finish_s(BUSY, 1024, 1008, 100) - warm_s
    assert slower_by_s > cold_s - warm_s


def test_capacity_is_what_full_steps_take_for_a_token() -> None:
    capacity = measured_capacity(learned(), 512, 8, 6000, 500.0)
    assert capacity is not None
    assert capacity.prompt_token_s == pytest.approx((0.005 + 20e-6 * 512) / 512, rel=0.3)
    assert capacity.output_token_s == pytest.approx((0.005 + 8 * 5e-4) / 8, rel=0.3)
    few = measured_capacity(learned(), 512, 8, 1000, 500.0)  # two sequences fit
    assert few is not None and few.output_token_s > 2 * capacity.output_token_s
    assert measured_capacity(StepTimeModel(), 512, 8, 6000, 500.0) is None


@pytest.mark.parametrize(("num_prompt_tokens", "expected"), [(0, 1), (47_000, 1), (49_000, 2), (480_000, 10)])
def test_executors_are_wanted_for_the_demand_and_some_room(num_prompt_tokens: int, expected: int) -> None:
    capacity = ExecutorCapacity(prompt_token_s=1e-3, output_token_s=1e-2)
    assert desired_executors(capacity, Demand(num_prompt_tokens, 0, 60), 3) == expected


def test_before_anything_is_known_there_are_as_many_as_are_wanted() -> None:
    assert desired_executors(None, Demand(1e9, 1e9, 60), 3) == 3
    assert desired_executors(None, Demand(0, 0, 60), 0) == 1
