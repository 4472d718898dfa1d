"""Continuous batching for one executor: what runs in the next step, on which blocks. Pure: time is an argument.

Knows requests, sequences, block tables and the device pool. Does not know the wire, text, tiers below the device, or other
executors. One Scheduler per executor; the shell drives it:

    add -> [prefix of the store: begin_load .. end_load] -> schedule -> apply -> ... -> update with a finish reason

Run-ahead: schedule may be called again before apply of the step before. A decode that is planned on top of an unapplied
step counts on a token that only the executor knows; if apply finds that the sequence had ended, the extra token is discarded.

What runs: step_planner.py. Who holds which blocks: running_set.py, block_pool.py. What came before: outstanding.py.
"""

import itertools
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace

from common.errors import KvPoolTooSmall
from common.ids import BlockKey, RequestId, SeqId
from scheduler_svc.core.admission import Admission, AdmissionLimits
from scheduler_svc.core.batch import Batch
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.deadlines import Deadlines
from scheduler_svc.core.forecast.wait import Backlog, WaitForecast
from scheduler_svc.core.outstanding import OutstandingSteps, PlannedStep
from scheduler_svc.core.plan import LoadPlan, SampledToken, SavePlan, SchedulerStats, SequenceUpdate, StepPlan
from scheduler_svc.core.policies.fair_share import FairShare
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.prefill_budget import PrefillBudget, WholeSteps
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.request_state import RequestState
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.running_set import RunningSet
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.step_planner import StepPlanner
from scheduler_svc.core.transfers import Transfers
from scheduler_svc.core.waiting_queue import WaitingQueue

__all__ = ["Scheduler", "SchedulerConfig"]

_FIRST_MEAN_OUTPUT_TOKENS = 128.0
_MEAN_WEIGHT = 0.02


class Scheduler:
    """See the module's first lines.

    Args:
        prefill_budget: of steps beside decodes; None: there is no limit but the step's.
        policy: who goes first, of this scheduler alone; None: fair shares of the config's tenants.
        waits: how long requests will wait; None: nobody knows.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        prefill_budget: PrefillBudget | None = None,
        policy: Policy | None = None,
        waits: WaitForecast | None = None,
    ):
        self.config = config
        self._requests = RequestTable(config.block_size, is_keyed=config.prefix_caching)
        self._policy = policy if policy is not None else FairShare(config.tenants)
        self._waiting = WaitingQueue(self._policy)
        self._admission = Admission(
            AdmissionLimits(config.max_waiting_requests, config.max_waiting_tokens, config.max_wait_s, config.tenants)
        )
        self._waits = waits
        self._deadlines = Deadlines()
        self._mean_output_tokens = _FIRST_MEAN_OUTPUT_TOKENS
        self._transfers = Transfers()
        self._loading: dict[int, RequestState] = {}
        self._planner = StepPlanner(
            config, self._requests, self._waiting, self._admission, self._policy, prefill_budget or WholeSteps()
        )
        self._num_discarded_tokens = 0
        self._start_session()

    def _start_session(self) -> None:
        """All blocks are free and the executor knows nothing."""
        config = self.config
        self._pool = BlockPool(config.num_blocks)
        max_running = min(config.max_num_seqs, config.max_num_batched_tokens)  # so that decodes leave room for all
        self._running = RunningSet(self._pool, config.block_size, max_running)
        self._transfers.restart(self._pool)
        self._outstanding = OutstandingSteps()
        self._planned_step = 0
        self._applied_step = 0

    def add(self, request: Request) -> tuple[SeqId, ...]:
        """Queues a request.

        Returns:
            The ids of its samples that have not ended, in order of index. All of them appear in updates.

        Raises:
            Overloaded: the queue is at one of its bounds, and the request comes from no other executor; see Admission.check.
            KvPoolTooSmall: prompt and max_tokens of one sample need more blocks than the pool has.
            DuplicateRequest: the request_id is known and not finished.
        """
        self._requests.check_new(request.request_id)
        config = self.config
        num_tokens = len(request.prompt_token_ids) + request.stop.max_tokens
        num_blocks = -(-(num_tokens - 1) // config.block_size)  # the last token is never computed
        if num_blocks > config.num_blocks:
            raise KvPoolTooSmall(
                f"a prompt of {len(request.prompt_token_ids)} tokens and max_tokens of {request.stop.max_tokens} need "
                f"{num_blocks} blocks of {config.block_size} tokens, the device pool has {config.num_blocks}",
                metadata={"numBlocks": str(config.num_blocks), "numBlocksNeeded": str(num_blocks)},
            )
        if not request.generated:  # what was let in elsewhere is not turned away here
            self._admission.check(request, lambda: self.expected_wait_s(request))
        self._admission.count_in(request)
        self._deadlines.add(request)
        state = self._requests.add(request)
        for sequence in state.sequences:
            self._waiting.insert(sequence)
        return tuple(sequence.seq_id for sequence in state.sequences)

    def expected_wait_s(self, request: Request) -> float:
        """Until a request that comes now would get its place in the batch; 0: not known, or at once."""
        if self._waits is None:
            return 0.0
        admission, config = self._admission, self.config
        num_tokens = self._policy.num_tokens_ahead(request)
        backlog = Backlog(
            num_prompt_tokens=num_tokens + self.num_prefill_tokens_ahead,
            num_waiting=round(admission.num_requests * min(1.0, num_tokens / max(1, admission.num_tokens))),
            num_running=len(self._running),
            num_seats=self._running.max_sequences,
            num_blocks=config.num_blocks,
            num_used_blocks=self._pool.num_used,
            block_size=config.block_size,
            num_output_tokens=self._mean_output_tokens,
        )
        return self._waits.expected_wait_s(backlog, len(request.prompt_token_ids))

    def cancel(self, request_id: RequestId, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """Ends all samples of a request, in whatever state. Its blocks are free for the very next plan; no update follows.

        Returns:
            False: no such request.
        """
        state = self._requests.get(request_id)
        if state is None:
            return False
        for sequence in list(state.sequences):
            self._end(sequence)
        return True

    def finish_sequence(self, seq_id: SeqId) -> None:
        """Ends one sample because of its text (a stop string). No update follows. Unknown or ended ids are fine."""
        sequence = self._requests.sequence(seq_id)
        if sequence is not None:
            self._end(sequence)

    def num_device_tokens(self, root_key: BlockKey, prompt_keys: Seq[BlockKey]) -> int:
        """Tokens of a prompt that are on the device now, for placement. Changes nothing."""
        return len(self._pool.index.match(prompt_keys)) * self.config.block_size

    @property
    def num_prefill_tokens_ahead(self) -> int:
        """Prompt tokens that are computed before a request that comes now: of steps under way and of prompts that were begun."""
        begun = (sequence.num_known_tokens - sequence.num_planned_tokens for sequence in self._running)
        planned = (chunk.num_tokens for step in self._outstanding for chunk in step.chunks)
        return sum(n for n in itertools.chain(begun, planned) if n > 1)

    @property
    def next_in_line(self) -> RequestId | None:
        """The request that is to be admitted next, if it is a new one. None: somebody is to go on first, or nobody waits."""
        sequence = self._policy.first()
        if sequence is None or not self._requests.state_of(sequence).is_queued:
            return None
        return sequence.request.request_id

    def is_queued(self, request_id: RequestId) -> bool:
        """Whether a request is here and was never admitted."""
        state = self._requests.get(request_id)
        return state is not None and state.is_queued

    def missing_keys(self, request_id: RequestId) -> tuple[BlockKey, ...]:
        """Keys of a waiting request's full prompt blocks after those that the device holds, for a look-up in the store.

        Empty when the request is not waiting any more, or when the first of them is being computed or loaded for another. A
        block whose last token is the prompt's last token is left out: at least one token has to be computed.
        """
        state = self._requests.get(request_id)
        if state is None or not state.is_queued or state.load_id is not None:
            return ()
        keys = self._loadable_keys(state)
        num_present = len(self._pool.index.match(keys))
        if num_present < len(keys) and self._pool.index.is_promised(keys[num_present]):
            return ()
        return tuple(keys[num_present:])

    def begin_load(self, request_id: RequestId, num_blocks: int) -> LoadPlan | None:
        """Takes device blocks for the first num_blocks of missing_keys and holds the request back until end_load.

        Returns:
            None: not waiting any more, nothing to load, or no blocks free now; the request then simply recomputes.
        """
        keys = self.missing_keys(request_id)[:num_blocks]
        if not keys:
            return None
        state = self._requests.get(request_id)
        assert state is not None, f"request {request_id} has keys"
        prefix = self._pool.index.match(self._loadable_keys(state))
        if not self._running.can_take(len(keys) + self._pool.num_cached_of(prefix)):
            return None
        plan = self._transfers.begin_load(prefix, keys, self._applied_step)
        if plan is not None:
            state.load_id = plan.load_id
            self._loading[plan.load_id] = state
            self._waiting.hold(state.sequences)
        return plan

    def end_load(self, load_id: int, num_loaded: int, num_by_tier: dict[str, int]) -> None:
        """The first num_loaded blocks hold the KV of their keys; the others go back. Unknown load ids are fine."""
        self._transfers.end_load(load_id, num_loaded)
        state = self._loading.pop(load_id, None)
        if state is not None:
            state.load_id = None
            self._waiting.release(state.sequences)
            state.loaded_by_tier = {tier: num * self.config.block_size for tier, num in num_by_tier.items() if num}
        self._waiting.wake(self._pool.index)

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step.

        Returns:
            None: nothing can run before the next apply, add, end_load or end_save.
        """
        batch = Batch(self._planned_step + 1, self.config.max_num_batched_tokens)
        self._pool.planned_step = batch.step_id
        self._planner.fill(batch, self._running, now_s)
        self._pool.release(batch.copy_sources)
        if not batch.planned:
            self._pool.planned_step = self._planned_step
            return None
        self._commit(batch)
        self._waiting.wake(self._pool.index)
        return batch.plan(self._running.take_dropped())

    def apply(self, step_id: int, sampled: Seq[SampledToken], errors: dict[SeqId, str]) -> list[SequenceUpdate]:
        """Takes in a step's result; steps come back in the order of their plans.

        Args:
            step_id: of the plan.
            sampled: one per chunk that reached the end of its sequence's known tokens.
            errors: sequences that failed alone, with the reason.

        Raises:
            ValueError: the result of another step is due.
        """
        step = self._outstanding.pop(step_id)
        self._applied_step = step_id
        token_ids = dict(sampled)
        updates = []
        failures = dict(errors)
        void: set[SeqId] = set()
        saves_blocks = self.config.save_blocks
        for sequence, attempt, num_tokens, is_sampling in step.chunks:
            token_id = token_ids.get(sequence.seq_id) if is_sampling else None
            status = sequence.status
            if status is SequenceStatus.FINISHED or sequence.attempt != attempt:
                self._num_discarded_tokens += token_id is not None
                void.add(sequence.seq_id)
                continue
            sequence.num_in_flight_steps -= 1
            sequence.num_in_flight_tokens -= is_sampling
            if errors and sequence.seq_id in errors:
                continue
            if status is SequenceStatus.RUNNING:
                sequence.num_applied_tokens += num_tokens
                if saves_blocks:
                    self._running.offer_saves(sequence)
            if token_id is not None:
                updates.append(self._take_token(sequence, token_id))
            elif is_sampling:
                failures[sequence.seq_id] = f"the executor returned no token in step {step_id}"
        for seq_id, message in failures.items():
            self._void_blocks(step, seq_id)
            failed = self._requests.sequence(seq_id)
            if failed is not None and seq_id not in void:
                self._end(failed)
                updates.append(failed.update(finish_reason=FinishReason.ERROR, error_message=message))
        self._waiting.wake(self._pool.index)
        return updates

    def expire(self, now_s: float) -> list[SequenceUpdate]:
        """Ends waiting requests whose queue_deadline_s has passed, and any whose deadline_s has.

        Returns:
            One with QUEUE_TIMEOUT or DEADLINE for each of their samples.
        """
        updates = []
        for request_id, reason in self._deadlines.take_due(now_s):
            state = self._requests.get(request_id)
            if state is None or (reason is FinishReason.QUEUE_TIMEOUT and not state.is_queued):
                continue
            if not _is_due(state.request, reason, now_s):  # another request of the same id
                continue
            for sequence in list(state.sequences):
                self._end(sequence)
                updates.append(sequence.update(finish_reason=reason))
        return updates

    @property
    def num_unsaved_blocks(self) -> int:
        """Blocks that take_saves would give."""
        return self._transfers.num_unsaved_blocks

    @property
    def num_clean_blocks(self) -> int:
        """About how many blocks may be handed out without losing what only the device has."""
        return max(0, self._pool.num_available - self._transfers.num_unsaved_blocks)

    def take_saves(self, max_blocks: int) -> SavePlan | None:
        """Blocks that became full and computed since the last call and are not in the store; holds them until end_save."""
        return self._transfers.take_saves(max_blocks)

    def end_save(self, save_id: int) -> None:
        """The executor has read the blocks of a SavePlan. Unknown ids are fine."""
        self._transfers.end_save(save_id)

    def cached_tokens(self, request_id: RequestId) -> dict[str, int]:
        """Prompt tokens of a request that were not computed for it, by tier: "device", "shm", "disk", "redis".

        Tiers with none are left out. Known from the first admission to the request's end.
        """
        state = self._requests.get(request_id)
        return dict(state.cached_by_tier) if state else {}

    def admitted_at_s(self, request_id: RequestId) -> float | None:
        """When the request first got a place in the batch; None if it has not, or has ended."""
        state = self._requests.get(request_id)
        return state.admitted_at_s if state else None

    def flush_cache(self) -> int:
        """Forgets every cached block that no sequence uses.

        Returns:
            How many.
        """
        return self._pool.flush()

    def reset(self) -> None:
        """The executor is gone with all KV: every running sequence goes back to the queue, keeping its place and its tokens."""
        for state in self._loading.values():
            state.load_id = None
            self._waiting.release(state.sequences)
        self._loading.clear()
        for sequence in self._requests.sequences():
            sequence.void_steps()
            if sequence.status is SequenceStatus.RUNNING:
                self._running.stop(sequence)
                self._waiting.insert(sequence)
        self._start_session()

    def drain(self) -> list[Request]:
        """Takes out requests that were never admitted, in order, so that another executor can have them."""
        states = [state for state in self._requests if state.is_queued]
        for state in states:
            for sequence in list(state.sequences):
                self._end(sequence)
        return [state.request for state in states]

    def evacuate(self) -> list[Request]:
        """Takes out all requests, in order, with the tokens they have, so that another executor can go on with them."""
        requests = []
        for state in self._requests:
            generated: list[tuple[int, ...] | None] = [None] * state.request.n
            for sequence in list(state.sequences):
                generated[sequence.index] = tuple(sequence.token_ids[sequence.num_prompt_tokens :])
                self._end(sequence)
            deadline_s = state.request.queue_deadline_s if state.is_queued else None  # of the first place in a batch
            requests.append(replace(state.request, generated=tuple(generated), queue_deadline_s=deadline_s))
        return requests

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return len(self._requests) > 0

    def stats(self) -> SchedulerStats:
        """Gauges and counters."""
        pool = self._pool
        largest_free_run, mean_run_length = pool.free_run_figures()
        num_shared_by_transfer = sum(pool.num_refs(block_id) == 2 for block_id in set(self._transfers.held_blocks()))
        return SchedulerStats(
            num_waiting_requests=self._admission.num_requests,
            num_waiting_tokens=self._admission.num_tokens,
            num_running_requests=len(self._requests) - self._admission.num_requests,
            num_running_sequences=len(self._running),
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used,
            num_shared_blocks=pool.num_shared - num_shared_by_transfer,
            num_cached_blocks=pool.num_cached,
            num_free_blocks=pool.num_free,
            largest_free_run=largest_free_run,
            mean_run_length=mean_run_length,
            kv_waste_ratio=self._running.num_empty_slots / max(1, pool.num_used * self.config.block_size),
            num_preemptions=self._planner.num_preemptions,
            num_recomputed_tokens=self._planner.num_recomputed_tokens,
            num_discarded_tokens=self._num_discarded_tokens,
            cached_tokens_by_tier=dict(self._planner.cached_tokens_by_tier),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError with the values when bookkeeping contradicts itself."""
        self._pool.check_integrity()
        self._running.check_integrity(Counter(self._transfers.held_blocks()))
        running = {sequence.seq_id for sequence in self._running}
        waiting = {sequence.seq_id for sequence in self._waiting}
        known = {sequence.seq_id for sequence in self._requests.sequences()}
        assert running | waiting == known, f"{running=} and {waiting=} are not {known=}"
        assert not running & waiting, f"{running & waiting} are running and waiting"
        queued = [state for state in self._requests if state.is_queued]
        assert len(queued) == self._admission.num_requests, f"{len(queued)} queued, counted {self._admission.num_requests}"
        num_tokens = sum(len(state.request.prompt_token_ids) for state in queued)
        assert num_tokens == self._admission.num_tokens, f"{num_tokens} tokens queued, counted {self._admission.num_tokens}"

    def _commit(self, batch: Batch) -> None:
        """The step is planned: what it computes may be built on by the next."""
        step = batch.step()
        for sequence, _, num_tokens, is_sampling in batch.planned:
            sequence.num_planned_tokens += num_tokens
            sequence.num_in_flight_steps += 1
            sequence.num_in_flight_tokens += is_sampling
            if num_tokens == 1:
                sequence.account.num_decodes += 1
            if sequence.num_listed < len(sequence.keys):
                step.listed += [(block_id, sequence) for block_id in self._running.list_blocks(sequence)]
        self._outstanding.append(step)
        self._planned_step = batch.step_id

    def _take_token(self, sequence: Sequence, token_id: int) -> SequenceUpdate:
        reason = sequence.append(token_id)
        sequence.is_protected = False
        if sequence.num_listed < len(sequence.keys) and sequence.status is SequenceStatus.RUNNING:
            listed = self._running.list_blocks(sequence)
            if self._outstanding.newest is not None:
                self._outstanding.newest.listed += [(block_id, sequence) for block_id in listed]
        if reason is None:
            return SequenceUpdate(sequence.request.request_id, sequence.seq_id, sequence.index, (token_id,))
        num_output_tokens = len(sequence.token_ids) - sequence.num_prompt_tokens
        self._mean_output_tokens += _MEAN_WEIGHT * (num_output_tokens - self._mean_output_tokens)
        self._end(sequence)
        stop_token_id = token_id if reason is FinishReason.STOP else None
        return sequence.update((token_id,), finish_reason=reason, stop_token_id=stop_token_id)

    def _void_blocks(self, step: PlannedStep, seq_id: SeqId) -> None:
        """A sequence failed in a step. What later steps built on its blocks is computed again."""
        for block_id, owner in step.listed:
            if owner.seq_id == seq_id:
                self._pool.forget(block_id)
        for later in self._outstanding:
            for block_id, _ in later.listed:
                self._pool.forget(block_id)
            for sequence in later.attached:
                self._replay(sequence)

    def _replay(self, sequence: Sequence) -> None:
        """Goes back to the tokens that are known for certain: steps in flight are void."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        sequence.void_steps()
        if sequence.status is SequenceStatus.RUNNING:
            self._running.stop(sequence)
            self._waiting.insert(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Takes a sequence out, whatever it is doing; its request too, if it was the last sample."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.stop(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        state = self._requests.remove(sequence)
        if not state.sequences and state.is_queued:
            self._admission.count_out(state.request)

    def _loadable_keys(self, state: RequestState) -> list[BlockKey]:
        return state.prompt_keys[: (len(state.request.prompt_token_ids) - 1) // self.config.block_size]


def _is_due(request: Request, reason: FinishReason, now_s: float) -> bool:
    due_s = request.queue_deadline_s if reason is FinishReason.QUEUE_TIMEOUT else request.deadline_s
    return due_s is not None and due_s < now_s
