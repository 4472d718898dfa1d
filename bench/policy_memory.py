"""A policy that preempts who came last: what plain engines do, and what preemption by cost is compared with."""

from collections.abc import Sequence as Seq
from typing import Any

from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.run_ahead import RunAhead
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core_maker import PlainCores, parts


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


class LastComeCores(PlainCores):
    """Cores of a policy with this one difference."""

    def scheduler(self, config: SchedulerConfig, run_ahead: RunAhead, policy: str, info: pb.ExecutorInfo) -> Scheduler:
        budget, plain, waits = parts(config, run_ahead, policy)
        return Scheduler(config, budget, LastComeFirstPreempted(plain), waits)
