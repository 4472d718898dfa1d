from collections import deque

import pytest

from scheduler_svc.core.run_ahead import BASE_LEAD_S, MAX_EXTRA_LEAD_S, RunAhead
from scheduler_svc.core.step_time import StepWork

ONE = StepWork(num_decodes=1, num_context_tokens=100)


class Executor:
    """Takes step_s for every step; plans take way_s to it and results as long back."""

    def __init__(self, policy: RunAhead, step_s: float, way_s: float = 0.0):
        self.policy = policy
        self.step_s = step_s
        self.way_s = way_s
        self.now_s = 100.0
        self.ends: deque[tuple[float, float]] = deque()  # when each step ends, and how long it waited for its plan
        self.idle_s = 0.0
        self.most = 0
        self._free_s = self.now_s

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while (due_s := self.policy.due_s(self.now_s)) is not None and not (self.ends and due_s > self._next_result_s):
                self.now_s = max(self.now_s, due_s)
                self.policy.note_sent(ONE, self.now_s)
                idle_s = max(0.0, self.now_s + self.way_s - self._free_s)
                self._free_s += idle_s + self.step_s
                self.ends.append((self._free_s, idle_s))
            self.most = max(self.most, len(self.ends))
            self.now_s = max(self.now_s, self._next_result_s)
            _, idle_s = self.ends.popleft()
            self.idle_s += idle_s
            self.policy.note_ended(self.step_s, idle_s, self.now_s)

    @property
    def _next_result_s(self) -> float:
        return self.ends[0][0] + self.way_s


def test_the_plan_after_a_long_step_waits_until_shortly_before_its_end() -> None:
    executor = Executor(RunAhead(8), 0.2)
    executor.run(200)
    executor.policy.restart()
    executor.policy.note_sent(ONE, executor.now_s)
    due_s = executor.policy.due_s(executor.now_s)
    assert due_s is not None
    assert due_s > executor.now_s + 0.15


@pytest.mark.parametrize("step_s", [0.0005, 0.002, 0.01, 0.05, 0.3])
def test_the_executor_is_never_without_a_plan(step_s: float) -> None:
    executor = Executor(RunAhead(16), step_s, way_s=0.0005)
    executor.run(50)
    executor.idle_s = 0.0
    executor.run(300)
    assert executor.idle_s == 0.0


def test_short_steps_are_sent_several_ahead() -> None:
    executor = Executor(RunAhead(8), 0.001)
    executor.run(100)
    assert executor.most == 8
    assert int(BASE_LEAD_S / 0.001) <= 8


def test_more_than_the_most_are_never_under_way() -> None:
    executor = Executor(RunAhead(1), 0.001)
    executor.run(50)
    assert executor.most == 1


def test_before_steps_are_measured_two_may_be_under_way() -> None:
    policy = RunAhead(8)
    for _ in range(2):
        assert policy.due_s(1.0) == 1.0
        policy.note_sent(ONE, 1.0)
    assert policy.due_s(1.0) is None


def test_an_executor_that_had_to_wait_gets_its_plans_earlier_and_later_again() -> None:
    policy = RunAhead(8)
    executor = Executor(policy, 0.1)
    executor.run(100)

    def wait_s() -> float:
        policy.restart()
        policy.note_sent(ONE, 0.0)
        due_s = policy.due_s(0.0)
        policy.restart()
        assert due_s is not None
        return due_s

    before_s = wait_s()
    for _ in range(50):
        policy.note_sent(ONE, 0.0)
        policy.note_sent(ONE, 0.0)
        policy.note_ended(0.1, 0.0, 0.1)
        policy.note_ended(0.1, 0.005, 0.2)
    assert before_s - MAX_EXTRA_LEAD_S - 1e-3 <= wait_s() < before_s - MAX_EXTRA_LEAD_S / 2
    for _ in range(2000):
        policy.note_sent(ONE, 0.0)
        policy.note_ended(0.1, 0.0, 0.1)
    assert wait_s() == pytest.approx(before_s, abs=1e-3)


def test_an_executor_that_had_nothing_to_do_was_not_kept_waiting() -> None:
    policy = RunAhead(8)
    executor = Executor(policy, 0.1)
    executor.run(100)
    policy.restart()
    for number in range(10):
        policy.note_sent(ONE, 200.0 + number)
        policy.note_ended(0.1, 0.9, 200.1 + number)
    policy.note_sent(ONE, 300.0)
    due_s = policy.due_s(300.0)
    assert due_s is not None and due_s > 300.1 - BASE_LEAD_S - 0.005


def test_a_plan_right_behind_the_last_result_came_too_late() -> None:
    policy = RunAhead(8)
    executor = Executor(policy, 0.1)
    executor.run(100)
    policy.restart()
    for number in range(10):
        policy.note_sent(ONE, 200.0 + number / 10)
        policy.note_ended(0.1, 0.001, 200.1 + number / 10)
    policy.note_sent(ONE, 300.0)
    due_s = policy.due_s(300.0)
    assert due_s is not None and due_s < 300.1 - BASE_LEAD_S - 0.02


def test_after_a_lost_session_nothing_is_under_way() -> None:
    policy = RunAhead(1)
    policy.note_sent(ONE, 0.0)
    policy.restart()
    assert policy.due_s(7.0) == 7.0


def test_steps_under_way_say_how_long_the_executor_is_busy() -> None:
    executor = Executor(RunAhead(8), 0.2)
    executor.run(200)
    executor.policy.restart()
    assert executor.policy.busy_s(executor.now_s) == 0.0
    executor.policy.note_sent(ONE, executor.now_s)
    executor.policy.note_sent(ONE, executor.now_s)
    assert executor.policy.busy_s(executor.now_s + 0.1) == pytest.approx(0.3, rel=0.05)
    assert executor.policy.busy_s(executor.now_s + 9.0) == 0.0
