"""A policy that preempts who came last: what plain engines do, and what preemption by cost is compared with."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.sequence import Sequence


class LastComeFirstPreempted:
    """Another policy with this one difference."""

    def __init__(self, policy: Policy):
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def __iter__(self) -> Any:
        return iter(self._policy)

    def choose_victim(self, candidates: Seq[Sequence]) -> Sequence | None:
        """Who came last and is not protected."""
        return next((one for one in reversed(candidates) if not one.is_protected), None)


def last_come_first_preempted(make_policy: Callable[[SchedulerConfig], Policy]) -> Callable[[SchedulerConfig], Policy]:
    """The same policy with the other preemption."""
    return lambda config: LastComeFirstPreempted(make_policy(config))
