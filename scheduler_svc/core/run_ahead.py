"""When the next plan is sent while steps are under way. Pure: measurements and the time are handed in.

Two things are at odds. The executor must never wait for a plan, so plans are sent before the results they build on. But a plan
that is sent is closed: a request that arrives afterwards waits for all steps under way. So the next plan goes out as late as it
may: a lead before the executor is expected to run out of work. The lead covers what the scheduler does between two plans,
which grows with the streams that have news, and the way to the executor. When the executor waited in spite of it, the lead
grows; then it shrinks slowly.
"""

from collections import deque
from dataclasses import dataclass

from scheduler_svc.core.step_time import StepTimeModel, StepWork

BASE_LEAD_S = 0.006
LEAD_PER_STREAM_S = 60e-6
MAX_EXTRA_LEAD_S = 0.03
_GROWTH_S = 0.004
_SHRINK = 0.995
_NOTICED_IDLE_S = 0.0003
_AT_ONCE_S = 0.003
_MAX_MARGIN = 0.5
_UNLEARNED_STEPS = 2
"""Steps that may be under way before the model has seen enough of them."""


@dataclass(slots=True)
class _Sent:
    work: StepWork
    predicted_s: float
    follows_others: bool


class RunAhead:
    """Of one executor.

    Attributes:
        step_times: learned from the steps.

    Args:
        max_steps: the most that may be under way.
    """

    def __init__(self, max_steps: int):
        self.step_times = StepTimeModel()
        self._max_steps = max_steps
        self._under_way: deque[_Sent] = deque()
        self._oldest_began_s = 0.0
        self._extra_lead_s = 0.0

    def restart(self) -> None:
        """Steps under way are lost; what was learned stays."""
        self._under_way.clear()

    def note_sent(self, work: StepWork, now_s: float) -> None:
        """A plan was sent."""
        # Right behind the last result, there was work all the time and the plan came too late.
        follows_others = bool(self._under_way) or now_s < self._oldest_began_s + _AT_ONCE_S
        if not self._under_way:
            self._oldest_began_s = now_s
        self._under_way.append(_Sent(work, self.step_times.predict_s(work), follows_others))

    def note_ended(self, seconds: float, idle_s: float, now_s: float) -> None:
        """The result of the oldest step under way is in.

        Args:
            seconds: that it took.
            idle_s: that the executor waited for its plan.
            now_s: the time.
        """
        ended = self._under_way.popleft()
        self._oldest_began_s = now_s
        self.step_times.learn(ended.work, seconds)
        if ended.follows_others and idle_s > _NOTICED_IDLE_S:
            self._extra_lead_s = min(MAX_EXTRA_LEAD_S, self._extra_lead_s + _GROWTH_S)
        else:
            self._extra_lead_s *= _SHRINK

    def busy_s(self, now_s: float) -> float:
        """Until the steps under way should have ended."""
        if not self._under_way:
            return 0.0
        return max(0.0, self._oldest_began_s + sum(sent.predicted_s for sent in self._under_way) - now_s)

    def due_s(self, now_s: float) -> float | None:
        """When to send the next plan: a time that may have passed; None: not before a result is in."""
        if not self._under_way:
            return now_s
        if len(self._under_way) >= self._max_steps:
            return None
        if not self.step_times.is_learned:
            return now_s if len(self._under_way) < _UNLEARNED_STEPS else None
        certain = 1.0 - min(_MAX_MARGIN, 2 * self.step_times.relative_error)
        lasts_s = certain * sum(sent.predicted_s for sent in self._under_way)
        lead_s = BASE_LEAD_S + LEAD_PER_STREAM_S * self._under_way[-1].work.num_sequences_told + self._extra_lead_s
        return self._oldest_began_s + lasts_s - lead_s
