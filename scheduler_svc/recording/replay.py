"""Runs the scheduler's core again on what was recorded, and compares what it decides. Pure: calls are handed in.

The core is the production one. It gets substitutes for tokens (outlines.py) and numbers for ids, which change no decision.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from common.errors import OctavoError
from common.ids import RequestId, SeqId
from octavo.recording.v1 import recording_pb2 as pb
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.plan import SequenceUpdate, StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.run_ahead import RunAhead
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import digests
from scheduler_svc.recording.digests import Digests
from scheduler_svc.recording.requests import request_of, work_of
from scheduler_svc.recording.start import config_of

_MAX_KEPT = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that came out another way.

    Attributes:
        number: of the call, from 1.
        step_id: planned last.
        what: of the core was called.
        detail: what differs, and what was decided now.
    """

    number: int
    step_id: int
    what: str
    detail: str


@dataclass(slots=True)
class ReplayFigures:
    """What a replay has seen.

    Attributes:
        num_decisions: answers that were compared.
        differences: the first ones.
        num_preemptions, num_cancelled, num_losses: of the run that was recorded: sequences that lost their blocks, requests that
            were cancelled while they were here, sessions that ended.
        over: why the recording ended; None: it does not say.
    """

    num_calls: int = 0
    num_requests: int = 0
    num_steps: int = 0
    num_decisions: int = 0
    num_differences: int = 0
    differences: list[Difference] = field(default_factory=list)
    num_preemptions: int = 0
    num_cancelled: int = 0
    num_losses: int = 0
    over: str | None = None


class Replay:
    """One core that lives its recorded life again.

    Args:
        make_scheduler: the core with its parts, as in production: of limits, times of steps, and the name of a policy.
    """

    def __init__(self, make_scheduler: Callable[[SchedulerConfig, RunAhead, str], Scheduler]):
        self.figures = ReplayFigures()
        self._make_scheduler = make_scheduler
        self._scheduler: Scheduler | None = None
        self._run_ahead: RunAhead | None = None
        self._config: SchedulerConfig | None = None
        self._stops: dict[RequestId, set[int]] = {}
        self._request_of: dict[SeqId, RequestId] = {}
        self._step_id = 0

    def take(self, call: pb.Call) -> None:
        """Runs one call.

        Raises:
            ValueError: calls come before there is a core.
        """
        figures = self.figures
        figures.num_calls += 1
        what = call.WhichOneof("call") or ""
        if what == "over":
            figures.over = call.over.reason
            return
        if what == "due":
            self._compare_due(call.due)
            return
        recorded = (call.digest, call.blocks_digest)
        try:
            decided = getattr(self, f"_{what}")(getattr(call, what))
        except OctavoError as error:
            decided = digests.of_error(error)
        except (ValueError, AssertionError, KeyError, IndexError) as error:
            decided = (-1, -1)
            self._differ(what, f"the core failed: {error!r}")
        if recorded != digests.NOTHING or decided not in (None, digests.NOTHING):
            figures.num_decisions += 1
            if decided != recorded and decided != (-1, -1):
                self._differ(what, _compared(recorded, decided or digests.NOTHING))

    def end(self) -> ReplayFigures:
        """What was seen, when all calls were taken."""
        if self._scheduler is not None:
            self.figures.num_preemptions += self._scheduler.stats().num_preemptions
        return self.figures

    @property
    def core(self) -> Scheduler:
        """The core."""
        if self._scheduler is None:
            raise ValueError("the recording does not begin with a core")
        return self._scheduler

    @property
    def run_ahead(self) -> RunAhead:
        """When plans are sent, and the times of steps as they were learned."""
        if self._run_ahead is None:
            raise ValueError("the recording does not begin with a core")
        return self._run_ahead

    def _differ(self, what: str, detail: str) -> None:
        self.figures.num_differences += 1
        if len(self.figures.differences) < _MAX_KEPT:
            self.figures.differences.append(Difference(self.figures.num_calls, self._step_id, what, detail))

    def _compare_due(self, due: pb.Due) -> None:
        self.figures.num_decisions += 1
        decided = self.run_ahead.due_s(due.now_s)
        recorded = due.due_s if due.HasField("due_s") else None
        if decided != recorded:
            self._differ("due", f"recorded {recorded} s, now {decided} s")

    def _start(self, start: pb.Start) -> None:
        if self._scheduler is not None:
            self.figures.num_preemptions += self._scheduler.stats().num_preemptions
        self._run_ahead = self._run_ahead or RunAhead(start.run_ahead)
        self._config = config_of(start)
        self._scheduler = self._make_scheduler(self._config, self._run_ahead, start.policy)
        self._stops.clear()
        self._request_of.clear()

    def _add(self, add: pb.Add) -> Digests:
        request_id = RequestId(str(add.request))
        assert self._config is not None, "no core"
        stops: set[int] = set()
        request = request_of(add, self._config.block_size, stops)
        seq_ids = self.core.add(request)
        self.figures.num_requests += 1
        self._stops[request_id] = stops
        self._request_of.update((seq_id, request_id) for seq_id in seq_ids)
        return digests.of_numbers(seq_ids), 0

    def _cancel(self, cancel: pb.Cancel) -> Digests:
        request_id = RequestId(str(cancel.request))
        was_here = self.core.cancel(request_id)
        self.figures.num_cancelled += was_here
        self._forget(request_id)
        return 1 + was_here, 0

    def _finish_sequence(self, finish: pb.FinishSequence) -> None:
        self.core.finish_sequence(SeqId(finish.seq_id))

    def _begin_load(self, load: pb.BeginLoad) -> Digests:
        plan = self.core.begin_load(RequestId(str(load.request)), load.num_blocks)
        return digests.of_transfer(plan.load_id, plan.block_ids) if plan else digests.NOTHING

    def _end_load(self, load: pb.EndLoad) -> None:
        self.core.end_load(load.load_id, load.num_loaded, dict(load.num_by_tier))

    def _schedule(self, schedule: pb.Schedule) -> Digests:
        plan: StepPlan | None = self.core.schedule(schedule.now_s)
        if plan is not None:
            self._step_id = plan.step_id
            self.figures.num_steps += 1
        return digests.of_plan(plan)

    def _apply(self, apply: pb.Apply) -> Digests:
        for place in apply.stops:
            request_id = self._request_of.get(SeqId(apply.seq_ids[place]))
            if request_id is not None:
                self._stops[request_id].add(apply.tokens[place])
        token_ids = {SeqId(seq_id): token for seq_id, token in zip(apply.seq_ids, apply.tokens, strict=True)}
        updates = self.core.apply(apply.step_id, token_ids, {SeqId(seq_id): "" for seq_id in apply.failed_seq_ids})
        return self._seen(updates)

    def _expire(self, expire: pb.Expire) -> Digests:
        return self._seen(self.core.expire(expire.now_s))

    def _take_saves(self, take: pb.TakeSaves) -> Digests:
        plan = self.core.take_saves(take.max_blocks)
        return digests.of_transfer(plan.save_id, plan.block_ids) if plan else digests.NOTHING

    def _end_save(self, save: pb.EndSave) -> None:
        self.core.end_save(save.save_id)

    def _flush_cache(self, _: pb.FlushCache) -> Digests:
        return digests.of_numbers((self.core.flush_cache(),)), 0

    def _reset(self, _: pb.Reset) -> None:
        self.core.reset()
        self.figures.num_losses += 1

    def _drain(self, _: pb.Drain) -> Digests:
        return self._taken_out(self.core.drain())

    def _evacuate(self, _: pb.Evacuate) -> Digests:
        return self._taken_out(self.core.evacuate())

    def _sent(self, sent: pb.Sent) -> None:
        self.run_ahead.note_sent(work_of(sent), sent.now_s)

    def _ended(self, ended: pb.Ended) -> None:
        self.run_ahead.note_ended(ended.seconds, ended.idle_s, ended.now_s)

    def _restart(self, _: pb.Restart) -> None:
        self.run_ahead.restart()

    def _taken_out(self, requests: list[Request]) -> Digests:
        for request in requests:
            self._forget(request.request_id)
        return digests.of_requests([int(request.request_id) for request in requests], requests)

    def _seen(self, updates: Iterable[SequenceUpdate]) -> Digests:
        for update in updates:
            if update.finish_reason is not None:
                self._request_of.pop(update.seq_id, None)
        return digests.of_updates(updates)

    def _forget(self, request_id: RequestId) -> None:
        self._stops.pop(request_id, None)


def _compared(recorded: Digests, decided: Digests) -> str:
    if recorded == digests.NOTHING:
        return "recorded: nothing, now: something"
    if decided == digests.NOTHING:
        return "recorded: something, now: nothing"
    return "other sequences, tokens or ids" if recorded[0] != decided[0] else "the same on other device blocks"
