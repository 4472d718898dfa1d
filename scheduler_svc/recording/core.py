"""A core that tells what it does: the same objects with the same methods, and each call is noted. Decides nothing itself.

Only calls that change something are told, and the ones whose answer is a decision. There is no flag in the core: who wants no
recording makes the plain objects.
"""

from collections.abc import Mapping

from common.errors import OctavoError
from common.ids import RequestId, SeqId
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.forecast.wait import WaitForecast
from scheduler_svc.core.plan import LoadPlan, SavePlan, SequenceUpdate, StepPlan
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.prefill_budget import PrefillBudget
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.run_ahead import RunAhead
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_time import StepWork
from scheduler_svc.core.updates import StepUpdates
from scheduler_svc.recording.recorder import Recording


class RecordedScheduler(Scheduler):
    """See Scheduler."""

    def __init__(
        self,
        recording: Recording,
        config: SchedulerConfig,
        prefill_budget: PrefillBudget | None = None,
        policy: Policy | None = None,
        waits: WaitForecast | None = None,
    ):
        super().__init__(config, prefill_budget, policy, waits)
        self._note = recording.note
        self._encode = recording.encode

    def add(self, request: Request) -> tuple[SeqId, ...]:
        """See Scheduler."""
        try:
            seq_ids = super().add(request)
        except OctavoError as error:
            self._note(self._encode.add, request, error)
            raise
        self._note(self._encode.add, request, seq_ids)
        return seq_ids

    def cancel(self, request_id: RequestId, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """See Scheduler."""
        was_here = super().cancel(request_id, reason)
        self._note(self._encode.cancel, request_id, was_here)
        return was_here

    def finish_sequence(self, seq_id: SeqId) -> None:
        """See Scheduler."""
        super().finish_sequence(seq_id)
        self._note(self._encode.finish_sequence, seq_id)

    def begin_load(self, request_id: RequestId, num_blocks: int) -> LoadPlan | None:
        """See Scheduler."""
        plan = super().begin_load(request_id, num_blocks)
        self._note(self._encode.begin_load, request_id, num_blocks, plan)
        return plan

    def end_load(self, load_id: int, num_loaded: int, num_by_tier: dict[str, int]) -> None:
        """See Scheduler."""
        super().end_load(load_id, num_loaded, num_by_tier)
        self._note(self._encode.end_load, load_id, num_loaded, num_by_tier)

    def schedule(self, now_s: float) -> StepPlan | None:
        """See Scheduler."""
        plan = super().schedule(now_s)
        self._note(self._encode.schedule, now_s, plan)
        return plan

    def apply(self, step_id: int, token_ids: Mapping[SeqId, int], errors: Mapping[SeqId, str]) -> StepUpdates:
        """See Scheduler."""
        updates = super().apply(step_id, token_ids, errors)
        self._note(self._encode.apply, step_id, token_ids, tuple(errors), updates)
        return updates

    def expire(self, now_s: float) -> list[SequenceUpdate]:
        """See Scheduler."""
        updates = super().expire(now_s)
        self._note(self._encode.expire, now_s, updates)
        return updates

    def take_saves(self, max_blocks: int) -> SavePlan | None:
        """See Scheduler."""
        plan = super().take_saves(max_blocks)
        self._note(self._encode.take_saves, max_blocks, plan)
        return plan

    def end_save(self, save_id: int) -> None:
        """See Scheduler."""
        super().end_save(save_id)
        self._note(self._encode.end_save, save_id)

    def flush_cache(self) -> int:
        """See Scheduler."""
        num_blocks = super().flush_cache()
        self._note(self._encode.flush_cache, num_blocks)
        return num_blocks

    def reset(self) -> None:
        """See Scheduler."""
        super().reset()
        self._note(self._encode.reset)

    def drain(self) -> list[Request]:
        """See Scheduler."""
        requests = super().drain()
        self._note(self._encode.drain, tuple(requests))
        return requests

    def evacuate(self) -> list[Request]:
        """See Scheduler."""
        requests = super().evacuate()
        self._note(self._encode.evacuate, tuple(requests))
        return requests


class RecordedRunAhead(RunAhead):
    """See RunAhead."""

    def __init__(self, recording: Recording, max_steps: int):
        super().__init__(max_steps)
        self._note = recording.note
        self._encode = recording.encode

    def restart(self) -> None:
        """See RunAhead."""
        super().restart()
        self._note(self._encode.restart)

    def note_sent(self, work: StepWork, now_s: float) -> None:
        """See RunAhead."""
        super().note_sent(work, now_s)
        self._note(self._encode.sent, work, now_s)

    def note_ended(self, seconds: float, idle_s: float, now_s: float) -> None:
        """See RunAhead."""
        super().note_ended(seconds, idle_s, now_s)
        self._note(self._encode.ended, seconds, idle_s, now_s)

    def due_s(self, now_s: float) -> float | None:
        """See RunAhead."""
        due_s = super().due_s(now_s)
        self._note(self._encode.due, now_s, due_s)
        return due_s
