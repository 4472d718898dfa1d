"""What a recording says of its run: who came, what they saw, and how long steps took. For simulating the same again.

Runs the recording through the core, because tokens are counted there. Knows no simulation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.errors import StartupError
from common.ids import SeqId
from octavo.recording.v1 import recording_pb2 as pb
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.forecast.wait import WaitForecast
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.prefill_budget import PrefillBudget
from scheduler_svc.core.request import Request
from scheduler_svc.core.run_ahead import RunAhead
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_time import StepWork
from scheduler_svc.core.updates import StepUpdates
from scheduler_svc.core_maker import parts
from scheduler_svc.recording.reader import RecordingFile
from scheduler_svc.recording.replay import Replay
from scheduler_svc.recording.requests import work_of
from scheduler_svc.simulation.arrivals import Arrival
from scheduler_svc.simulation.outcome import Served


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step as it was.

    Attributes:
        sent_s: when its plan went out; ended_s: when its result was in.
        was_alone: no other was under way when it was sent.
    """

    work: StepWork
    sent_s: float
    ended_s: float
    seconds: float
    idle_s: float
    was_alone: bool


@dataclass
class RecordedRun:
    """See the module's first lines.

    Attributes:
        served: requests in the order of their arrival; seconds from the first one's arrival.
        start: of the last core.
    """

    served: list[Served] = field(default_factory=list)
    steps: list[MeasuredStep] = field(default_factory=list)
    start: pb.Start = field(default_factory=pb.Start)

    @property
    def arrivals(self) -> list[Arrival]:
        """Who came, with as many output tokens as they got."""
        return [one.arrival for one in self.served]

    @classmethod
    def read(cls, path: Path) -> "RecordedRun":
        """The run of one executor.

        Raises:
            StartupError: there is no such recording, or no request in it.
        """
        run = cls()
        watched: list[_WatchedScheduler] = []

        def make(config: SchedulerConfig, run_ahead: RunAhead, policy: str) -> Scheduler:
            watched.append(_WatchedScheduler(config, *parts(config, run_ahead, policy)))
            return watched[-1]

        replay = Replay(make)
        sent: list[pb.Sent] = []
        for call in RecordingFile.of(path).calls():
            match call.WhichOneof("call"):
                case "start":
                    run.start = call.start
                case "sent":
                    sent.append(call.sent)
                case "restart":
                    sent.clear()
                case "ended":
                    ended, begun = call.ended, sent.pop(0)
                    watched[-1].now_s = ended.now_s
                    step = MeasuredStep(
                        work_of(begun), begun.now_s, ended.now_s, ended.seconds, ended.idle_s,
                        was_alone=not run.steps or run.steps[-1].ended_s <= begun.now_s,
                    )  # fmt: skip
                    run.steps.append(step)
            replay.take(call)
        by_arrival = sorted((one for core in watched for one in core.seen.values()), key=lambda one: one.arrival.at_s)
        run.served = _from_zero([one for one in by_arrival if one.num_tokens])
        if not run.served:
            raise StartupError(f"{path}: no request in it got a token")
        return run


class _WatchedScheduler(Scheduler):
    """The core, and when its requests got their tokens.

    Attributes:
        now_s: of the result that is applied next.
        seen: requests by their number of arrival; times as they were recorded.
    """

    def __init__(self, config: SchedulerConfig, prefill_budget: PrefillBudget, policy: Policy, waits: WaitForecast):
        super().__init__(config, prefill_budget, policy, waits)
        self.now_s = 0.0
        self.seen: dict[str, Served] = {}

    def add(self, request: Request) -> tuple[SeqId, ...]:
        """See Scheduler."""
        seq_ids = super().add(request)
        prompt = request.prompt_token_ids
        arrival = Arrival(request.arrival_s, len(prompt), 1, lambda: prompt, request.tenant, request.service_class)
        self.seen[request.request_id] = Served(arrival)
        return seq_ids

    def apply(self, step_id: int, token_ids: Mapping[SeqId, int], errors: Mapping[SeqId, str]) -> StepUpdates:
        """See Scheduler."""
        updates = super().apply(step_id, token_ids, errors)
        for update in updates:
            if update.token_ids and update.index == 0:
                one = self.seen[update.request_id]
                one.last_s = self.now_s
                one.first_s = one.last_s if one.first_s is None else one.first_s
                one.num_tokens += len(update.token_ids)
        return updates


def _from_zero(served: list[Served]) -> list[Served]:
    """With times from the first arrival, and arrivals that ask for what they got."""
    result = []
    for one in served:
        zero_s = served[0].arrival.at_s
        old = one.arrival
        arrival = replace(old, at_s=old.at_s - zero_s, num_output_tokens=one.num_tokens)
        first_s, last_s = one.first_s or 0.0, one.last_s or 0.0
        result.append(Served(arrival, first_s - zero_s, last_s - zero_s, one.num_tokens))
    return result
