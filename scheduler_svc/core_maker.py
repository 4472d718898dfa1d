"""Puts together what decides for one executor, plain or recorded. Knows the core's parts; holds none of them."""

from typing import Protocol

from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.forecast.wait import WaitForecast
from scheduler_svc.core.policies.choice import POLICIES
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.prefill_budget import InProportion, PrefillBudget
from scheduler_svc.core.run_ahead import RunAhead
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording.core import RecordedRunAhead, RecordedScheduler
from scheduler_svc.recording.recorder import Recording


class CoreMaker(Protocol):
    """Makes the core of one executor."""

    def run_ahead(self, max_steps: int) -> RunAhead:
        """Once, at first."""
        ...

    def scheduler(self, config: SchedulerConfig, run_ahead: RunAhead, policy: str, info: pb.ExecutorInfo) -> Scheduler:
        """At the first session, and whenever the executor came back as another one."""
        ...


class PlainCores:
    """The core and nothing else."""

    def run_ahead(self, max_steps: int) -> RunAhead:
        """See CoreMaker."""
        return RunAhead(max_steps)

    def scheduler(self, config: SchedulerConfig, run_ahead: RunAhead, policy: str, info: pb.ExecutorInfo) -> Scheduler:
        """See CoreMaker."""
        return plain_scheduler(config, run_ahead, policy)


class RecordedCores:
    """Cores that tell a recording what they do."""

    def __init__(self, recording: Recording):
        self._recording = recording
        self._max_steps = 0

    def run_ahead(self, max_steps: int) -> RunAhead:
        """See CoreMaker."""
        self._max_steps = max_steps
        return RecordedRunAhead(self._recording, max_steps)

    def scheduler(self, config: SchedulerConfig, run_ahead: RunAhead, policy: str, info: pb.ExecutorInfo) -> Scheduler:
        """See CoreMaker."""
        device = (info.model, info.backend, info.dtype)
        self._recording.note(self._recording.encode.start, config, self._max_steps, policy, device)
        return RecordedScheduler(self._recording, config, *parts(config, run_ahead, policy))


def plain_scheduler(config: SchedulerConfig, run_ahead: RunAhead, policy: str) -> Scheduler:
    """A core with its parts."""
    return Scheduler(config, *parts(config, run_ahead, policy))


def parts(config: SchedulerConfig, run_ahead: RunAhead, policy: str) -> tuple[PrefillBudget, Policy, WaitForecast]:
    """What a core is made of beside its limits: how many prompt tokens beside decodes, who goes first, how long others wait."""
    step_times, max_tokens = run_ahead.step_times, config.max_num_batched_tokens
    return InProportion(step_times, max_tokens), POLICIES[policy](config.tenants), WaitForecast(step_times, max_tokens)
