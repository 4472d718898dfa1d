"""A scheduler, a model executor and a store in one thread: plans in flight, transfers at their worst moments, outputs checked."""

import itertools
from collections import deque
from dataclasses import replace

from common.block_hash import root_key
from common.ids import BlockKey, RequestId, SeqId
from scheduler_svc.core.plan import LoadPlan, SavePlan, SequenceUpdate, StepPlan
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.prefill_budget import PrefillBudget
from scheduler_svc.core.request import FinishReason, Request, SamplingParams, ServiceClass, StopConditions
from scheduler_svc.core.scheduler import Scheduler, SchedulerConfig
from tests.unit.scheduler_svc.core.model_executor import ModelExecutor, expected_output

ROOT = root_key(bytes(32))
OTHER_ROOT = root_key(bytes(32), "tenant")


def make_config(**changes: object) -> SchedulerConfig:
    config = SchedulerConfig(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_chunk_tokens=32)
    return replace(config, **changes)  # type: ignore[arg-type]


def sizes(plan: StepPlan | None) -> list[tuple[int, int]]:
    """(sequence, tokens) of each chunk."""
    assert plan is not None
    return [(chunk.seq_id, chunk.num_tokens) for chunk in plan.chunks]


class Rig:
    """See the module's first line."""

    def __init__(self, config: SchedulerConfig, prefill_budget: PrefillBudget | None = None, policy: Policy | None = None):
        self.config = config
        self.scheduler = Scheduler(config, prefill_budget, policy)
        self.executor = self._start_executor()
        self.plans: deque[StepPlan] = deque()
        self.store: dict[BlockKey, list[int]] = {}
        self.loads: list[tuple[LoadPlan, int, bool]] = []
        self.saves: list[tuple[SavePlan, bool]] = []
        self.requests: dict[RequestId, tuple[Request, tuple[SeqId, ...]]] = {}
        self.outputs: dict[SeqId, list[int]] = {}
        self.live: dict[SeqId, RequestId] = {}
        self.ended: dict[SeqId, FinishReason] = {}
        self.now_s = 0.0
        self._names = itertools.count()

    def _start_executor(self) -> ModelExecutor:
        config = self.config
        return ModelExecutor(config.num_blocks, config.block_size, config.max_num_seqs, config.max_num_batched_tokens)

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        n: int = 1,
        stop: set[int] | None = None,
        min_tokens: int = 0,
        root: BlockKey = ROOT,
        queue_deadline_s: float | None = None,
        tenant: str = "",
        service_class: ServiceClass = ServiceClass.STANDARD,
        priority: int = 0,
        deadline_s: float | None = None,
        tpot_target_s: float | None = None,
    ) -> RequestId:
        request = Request(
            request_id=RequestId(f"r{next(self._names)}"),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(seed=7),
            stop=StopConditions(max_tokens, min_tokens, frozenset(stop or ())),
            root_key=root,
            arrival_s=self.now_s,
            n=n,
            queue_deadline_s=queue_deadline_s,
            tenant=tenant,
            service_class=service_class,
            priority=priority,
            deadline_s=deadline_s,
            tpot_target_s=tpot_target_s,
        )
        seq_ids = self.scheduler.add(request)
        self.requests[request.request_id] = (request, seq_ids)
        for seq_id in seq_ids:
            self.outputs[seq_id] = []
            self.live[seq_id] = request.request_id
            self.executor.root_of[seq_id] = root
        return request.request_id

    def seq_ids(self, request_id: RequestId) -> tuple[SeqId, ...]:
        return self.requests[request_id][1]

    def live_requests(self) -> list[RequestId]:
        return list(dict.fromkeys(self.live.values()))

    def live_sequences(self) -> list[SeqId]:
        return list(self.live)

    def end(self, seq_id: SeqId, reason: FinishReason) -> None:
        if seq_id in self.live:
            del self.live[seq_id]
            self.ended[seq_id] = reason

    def cancel(self, request_id: RequestId) -> None:
        assert self.scheduler.cancel(request_id)
        for seq_id in self.seq_ids(request_id):
            self.end(seq_id, FinishReason.CANCELLED)

    def finish(self, seq_id: SeqId) -> None:
        self.scheduler.finish_sequence(seq_id)
        self.end(seq_id, FinishReason.CANCELLED)

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now_s)
        if plan is not None:
            self.plans.append(plan)
        return plan

    def apply(self) -> list[SequenceUpdate]:
        """Runs the oldest plan and applies its result: the latest moment at which an executor could have run it."""
        plan = self.plans.popleft()
        sampled, errors = self.executor.run(plan)
        updates = list(self.scheduler.apply(plan.step_id, sampled, errors))
        self.take(updates)
        return updates

    def take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            assert update.seq_id not in self.ended, "an update follows the end"
            assert self.seq_ids(update.request_id)[update.index] == update.seq_id
            self.outputs[update.seq_id] += update.token_ids
            if update.finish_reason is not None:
                self.end(update.seq_id, update.finish_reason)
                self._check_output(update)

    def _check_output(self, update: SequenceUpdate) -> None:
        if update.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        request, _ = self.requests[update.request_id]
        tokens, reason = expected_output(request, update.index)
        assert self.outputs[update.seq_id] == tokens
        assert update.finish_reason is reason
        assert update.stop_token_id == (tokens[-1] if reason is FinishReason.STOP else None)

    def begin_load(self, request_id: RequestId, num_loaded: int, *, early: bool) -> bool:
        """Loads what the store has of the missing blocks, num_loaded at most; early: before steps in flight run that may."""
        num_present = 0
        for key in self.scheduler.missing_keys(request_id):
            if key not in self.store:
                break
            num_present += 1
        plan = self.scheduler.begin_load(request_id, num_present) if num_present else None
        if plan is None:
            return False
        assert len(plan.keys) == num_present
        num_loaded = min(num_loaded, num_present)
        early = early and not any(step.step_id <= plan.after_step for step in self.plans)
        if early:
            self._write_loaded(plan, num_loaded)
        self.loads.append((plan, num_loaded, early))
        return True

    def end_load(self, position: int = 0) -> None:
        plan, num_loaded, early = self.loads.pop(position)
        while self.plans and self.plans[0].step_id <= plan.after_step:
            self.apply()
        if not early:
            self._write_loaded(plan, num_loaded)
        self.scheduler.end_load(plan.load_id, num_loaded, {"shm": num_loaded})

    def _write_loaded(self, plan: LoadPlan, num_loaded: int) -> None:
        self.executor.write(plan.block_ids, [self.store[key] for key in plan.keys[:num_loaded]])

    def take_saves(self, max_blocks: int, *, early: bool) -> bool:
        plan = self.scheduler.take_saves(max_blocks)
        if plan is None:
            return False
        if early:
            self._save(plan)
        self.saves.append((plan, early))
        return True

    def end_save(self, position: int = 0) -> None:
        plan, early = self.saves.pop(position)
        if not early:
            self._save(plan)
        self.scheduler.end_save(plan.save_id)

    def _save(self, plan: SavePlan) -> None:
        for key, block_id in zip(plan.keys, plan.block_ids, strict=True):
            content = self.executor.read(block_id)
            assert self.store.setdefault(key, content) == content, "one key, two contents"

    def reset(self) -> None:
        """The executor dies and another takes its place."""
        self._lose_executor()
        self.scheduler.reset()
        self._end_transfers()

    def evacuate(self) -> None:
        """The executor dies, and its requests go on at another one; here it is the same scheduler again."""
        self._lose_executor()
        moved = self.scheduler.evacuate()
        self.scheduler.reset()
        self._end_transfers()
        for request in moved:
            old_ids = self.seq_ids(request.request_id)
            new_ids = iter(self.scheduler.add(request))
            seq_ids = tuple(old_id if old_id in self.ended else next(new_ids) for old_id in old_ids)
            self.requests[request.request_id] = (request, seq_ids)
            for old_id, new_id in zip(old_ids, seq_ids, strict=True):
                if old_id in self.live:
                    self.outputs[new_id] = self.outputs.pop(old_id)
                    self.live[new_id] = self.live.pop(old_id)
                    self.executor.root_of[new_id] = request.root_key

    def _lose_executor(self) -> None:
        roots = self.executor.root_of
        self.executor = self._start_executor()
        self.executor.root_of = roots
        self.plans.clear()

    def _end_transfers(self) -> None:
        """News of transfers that were under way comes late."""
        for plan, num_loaded, _ in self.loads:
            self.scheduler.end_load(plan.load_id, num_loaded, {})
        for save, _ in self.saves:
            self.scheduler.end_save(save.save_id)
        self.loads.clear()
        self.saves.clear()

    def run(self, *, run_ahead: int = 1, max_steps: int = 10_000) -> int:
        """Runs until nothing is left to do, with so many plans ahead of the one that runs. Returns the number of steps."""
        num_steps = 0
        while self.scheduler.has_work or self.plans:
            while len(self.plans) < 1 + run_ahead and self.schedule() is not None:
                num_steps += 1
                assert num_steps <= max_steps, "no end in sight"
            self.scheduler.check_integrity()
            assert self.plans or self.loads or self.saves, "nothing runs, nothing is awaited, and there is work"
            while not self.plans and self.loads:
                self.end_load()
            while not self.plans and self.saves:
                self.end_save()
            if self.plans:
                self.apply()
            self.scheduler.check_integrity()
        return num_steps

    def wind_up(self, run_ahead: int = 1) -> None:
        """Runs to the end and checks that everything came out and everything came back."""
        while self.loads:
            self.end_load()
        while self.saves:
            self.end_save()
        self.run(run_ahead=run_ahead)
        assert set(self.ended) == set(self.outputs), "a sequence has no end"
        while self.take_saves(1000, early=False):
            self.end_save()
        self.scheduler.flush_cache()
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert (stats.num_used_blocks, stats.num_cached_blocks) == (0, 0)
        assert stats.num_free_blocks == stats.largest_free_run == self.config.num_blocks
        assert (stats.num_running_sequences, stats.num_waiting_requests, stats.num_waiting_tokens) == (0, 0, 0)
