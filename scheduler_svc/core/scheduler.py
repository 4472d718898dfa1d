"""Continuous batching for one executor: what runs in the next step, on which blocks. Pure: time is an argument.

Knows requests, sequences, block tables and the device pool. Does not know the wire, text, tiers below the device, or other
executors. One Scheduler per executor; the shell drives it:

    add -> [prefix of the store: begin_load .. end_load] -> schedule -> apply -> ... -> update with a finish reason

Run-ahead: schedule may be called again before apply of the step before. A decode that is planned on top of an unapplied
step counts on a token that only the executor knows; if apply finds that the sequence had ended, the extra token is discarded.

A step: step_planner.py fills a batch (batch.py) with the decodes (decodes.py), prompts that were begun and those admitted;
session.py commits it, results.py takes in what it brings. Who holds which blocks: running_set.py, block_pool.py.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from common.errors import KvPoolTooSmall
from common.ids import BlockKey, RequestId, SeqId
from scheduler_svc.core.admission import Admission, AdmissionLimits
from scheduler_svc.core.batch import Batch
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.deadlines import Deadlines
from scheduler_svc.core.forecast.wait import Backlog, WaitForecast
from scheduler_svc.core.plan import LoadPlan, SavePlan, SchedulerStats, SequenceUpdate, StepPlan
from scheduler_svc.core.policies.fair_share import FairShare
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.prefill_budget import PrefillBudget, WholeSteps
from scheduler_svc.core.prefix_loads import PrefixLoads
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.results import Results
from scheduler_svc.core.running_set import RunningSet
from scheduler_svc.core.session import Session
from scheduler_svc.core.step_planner import StepPlanner
from scheduler_svc.core.transfers import Transfers
from scheduler_svc.core.updates import StepUpdates
from scheduler_svc.core.waiting_queue import WaitingQueue

__all__ = ["Scheduler", "SchedulerConfig"]


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
        self._transfers = Transfers()
        self._loads = PrefixLoads(self._requests, self._waiting, self._transfers, config.block_size)
        self._results = Results(self._requests, self._waiting, self._admission, saves_blocks=config.save_blocks)
        self._planner = StepPlanner(
            config, self._requests, self._waiting, self._admission, self._policy, prefill_budget or WholeSteps()
        )
        self._start_session()

    def _start_session(self) -> None:
        self._session = Session(self.config)
        self._pool = self._session.pool
        self._transfers.restart(self._pool)

    @property
    def _running(self) -> RunningSet:
        return self._session.running

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
            num_output_tokens=self._results.mean_output_tokens,
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
            self._results.end(self._session, sequence)
        return True

    def finish_sequence(self, seq_id: SeqId) -> None:
        """Ends one sample because of its text (a stop string). No update follows. Unknown or ended ids are fine."""
        sequence = self._requests.sequence(seq_id)
        if sequence is not None:
            self._results.end(self._session, sequence)

    def num_device_tokens(self, root_key: BlockKey, prompt_keys: Seq[BlockKey]) -> int:
        """Tokens of a prompt that are on the device now, for placement. Changes nothing."""
        return len(self._pool.index.match(prompt_keys)) * self.config.block_size

    @property
    def num_prefill_tokens_ahead(self) -> int:
        """Prompt tokens that are computed before a request that comes now: of steps under way and of prompts that were begun."""
        begun = (sequence.num_known_tokens - sequence.num_planned_tokens for sequence in self._running.begun)
        planned = (chunk.num_tokens for step in self._session.outstanding for chunk in step.chunks)
        return sum(n for n in itertools.chain(begun, planned) if n > 1)

    @property
    def next_in_line(self) -> RequestId | None:
        """The request that is to be admitted next, if it waits whole. None: others of its samples run, or nobody waits."""
        sequence = self._policy.first()
        if sequence is None or not self._requests.state_of(sequence).waits_whole:
            return None
        return sequence.request.request_id

    def waiting_keys(self, request_id: RequestId) -> tuple[BlockKey, ...]:
        """Keys of the full blocks of a request that waits whole, preempted or never admitted, but for the last known token's.

        Empty when it does not: others of its samples run, or it has ended.
        """
        state = self._requests.get(request_id)
        return tuple(state.waiting_keys) if state is not None and state.waits_whole else ()

    def missing_keys(self, request_id: RequestId) -> tuple[BlockKey, ...]:
        """Those of waiting_keys after the ones that the device holds, for a look-up in the store.

        Empty also when the first of them is being computed or loaded for another.
        """
        return self._loads.missing_keys(self._session, request_id)

    def begin_load(self, request_id: RequestId, num_blocks: int) -> LoadPlan | None:
        """Takes device blocks for the first num_blocks of missing_keys and holds the request back until end_load.

        Returns:
            None: not waiting any more, nothing to load, or no blocks free now; the request then simply recomputes.
        """
        return self._loads.begin(self._session, request_id, num_blocks)

    def end_load(self, load_id: int, num_loaded: int, num_by_tier: dict[str, int]) -> None:
        """The first num_loaded blocks hold the KV of their keys; the others go back. Unknown load ids are fine."""
        self._loads.end(load_id, num_loaded, num_by_tier)
        self._waiting.wake(self._pool.index)

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step.

        Returns:
            None: nothing can run before the next apply, add, end_load or end_save.
        """
        session = self._session
        planned_step_id = session.outstanding.planned_step_id
        batch = Batch(planned_step_id + 1, self.config.max_num_batched_tokens)
        self._pool.planned_step = batch.step_id
        self._planner.fill(batch, session, now_s)
        self._pool.release(batch.copy_sources)
        if batch.is_empty:
            self._pool.planned_step = planned_step_id
            return None
        step = session.commit(batch)
        self._waiting.wake(self._pool.index)
        return batch.plan(step.decodes.chunks, session.running.take_dropped())

    def apply(self, step_id: int, token_ids: Mapping[SeqId, int], errors: Mapping[SeqId, str]) -> StepUpdates:
        """Takes in a step's result; steps come back in the order of their plans.

        Args:
            step_id: of the plan.
            token_ids: drawn for each chunk that reached the end of its sequence's known tokens.
            errors: sequences that failed alone, with the reason.

        Raises:
            ValueError: the result of another step is due.
        """
        step = self._session.outstanding.pop(step_id)
        updates = self._results.apply(self._session, step, token_ids, errors)
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
                self._results.end(self._session, sequence)
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
        self._loads.give_up()
        for sequence in self._requests.sequences():
            self._results.replay(self._session, sequence)
        self._start_session()

    def drain(self) -> list[Request]:
        """Takes out requests that were never admitted, in order, so that another executor can have them."""
        states = [state for state in self._requests if state.is_queued]
        for state in states:
            for sequence in list(state.sequences):
                self._results.end(self._session, sequence)
        return [state.request for state in states]

    def evacuate(self) -> list[Request]:
        """Takes out all requests, in order, with the tokens they have, so that another executor can go on with them."""
        requests = []
        for state in self._requests:
            generated: list[tuple[int, ...] | None] = [None] * state.request.n
            for sequence in list(state.sequences):
                generated[sequence.index] = tuple(sequence.token_ids[sequence.num_prompt_tokens :])
                self._results.end(self._session, sequence)
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
            num_discarded_tokens=self._results.num_discarded_tokens,
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


def _is_due(request: Request, reason: FinishReason, now_s: float) -> bool:
    due_s = request.queue_deadline_s if reason is FinishReason.QUEUE_TIMEOUT else request.deadline_s
    return due_s is not None and due_s < now_s
