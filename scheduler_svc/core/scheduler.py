"""Continuous batching for one executor: what runs in the next step, on which blocks. Pure: time is an argument.

Knows requests, sequences, block tables and the device pool. Does not know the wire, text, tiers below the device, or other
executors. One Scheduler per executor; the shell drives it:

    add -> [prefix of the store: begin_load .. end_load] -> schedule -> apply -> ... -> update with a finish reason

Run-ahead: schedule may be called again before apply of the step before. A decode that is planned on top of an unapplied
step counts on a token that only the executor knows; if apply finds that the sequence had ended, the extra token is discarded.

Policy: decodes first, then chunks of prompts that were begun, then admissions, each in order of arrival, up to the step's
token budget. A sequence is admitted when blocks for all its known tokens are there, and one more for each running sequence.
Who is preempted: preemption.py. What is taken over instead of computed: attachment.py.
"""

import bisect
from collections import Counter, OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.block_hash import chain_keys
from common.errors import DuplicateRequest, KvPoolTooSmall
from common.ids import BlockId, BlockKey, RequestId, SeqId
from scheduler_svc.core.attachment import Attachment, Awaited, find_attachment
from scheduler_svc.core.batch import Batch
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.block_table import BlockTable
from scheduler_svc.core.outstanding import OutstandingSteps, PlannedStep
from scheduler_svc.core.plan import BlockCopy, LoadPlan, SampledToken, SavePlan, SchedulerStats, SequenceUpdate, StepPlan
from scheduler_svc.core.preemption import choose_victim
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.request_state import RequestState
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.transfers import Transfers
from scheduler_svc.core.waiting_queue import WaitingQueue

NUM_REMEMBERED_REQUESTS = 4096
"""How many finished requests can still be asked about."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one executor and of its queue.

    Attributes:
        num_blocks, block_size, max_num_seqs, max_num_batched_tokens: of the executor, see octavo.executor.v1.ExecutorInfo.
        max_chunk_tokens: most prompt tokens of one sequence in one step.
        max_waiting_requests, max_waiting_tokens: bounds of the queue.
        prefix_caching: whether computed blocks are found again by later requests.
        save_blocks: whether computed full blocks are offered to the store.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_tokens: int
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1 << 20
    prefix_caching: bool = True
    save_blocks: bool = False


class Scheduler:
    """See the module's first lines."""

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._requests: dict[RequestId, RequestState] = {}
        self._finished: OrderedDict[RequestId, RequestState] = OrderedDict()
        self._sequences: dict[SeqId, Sequence] = {}
        self._waiting = WaitingQueue(config.max_waiting_requests, config.max_waiting_tokens)
        self._running: list[Sequence] = []  # in order of arrival
        self._num_arrivals = 0
        self._num_sequences = 0
        self._num_preemptions = 0
        self._num_discarded_tokens = 0
        self._cached_tokens: Counter[str] = Counter()
        self._loading: dict[int, RequestState] = {}
        self._pool = BlockPool(config.num_blocks)
        self._transfers = Transfers(self._pool)
        self._outstanding = OutstandingSteps()
        self._dropped: list[SeqId] = []
        self._planned_step = 0
        self._applied_step = 0

    def add(self, request: Request) -> tuple[SeqId, ...]:
        """Queues a request.

        Returns:
            The ids of its n samples, in order of index. All of them appear in updates.

        Raises:
            QueueFull: the queue is at one of its bounds; retry_after_s is set.
            KvPoolTooSmall: prompt and max_tokens of one sample need more blocks than the pool has.
            DuplicateRequest: the request_id is known and not finished.
        """
        if request.request_id in self._requests:
            raise DuplicateRequest(f"request_id: {request.request_id!r} is in use", metadata={"requestId": request.request_id})
        config = self.config
        num_tokens = len(request.prompt_token_ids) + request.stop.max_tokens
        num_blocks = -(-(num_tokens - 1) // config.block_size)  # the last token is never computed
        if num_blocks > config.num_blocks:
            raise KvPoolTooSmall(
                f"a prompt of {len(request.prompt_token_ids)} tokens and max_tokens of {request.stop.max_tokens} need "
                f"{num_blocks} blocks of {config.block_size} tokens, the device pool has {config.num_blocks}",
                metadata={"numBlocks": str(config.num_blocks), "numBlocksNeeded": str(num_blocks)},
            )
        self._waiting.count_in(len(request.prompt_token_ids))
        keys = []
        if config.prefix_caching:
            keys = chain_keys(request.root_key, request.prompt_token_ids, config.block_size)
        state = RequestState(request, [], keys)
        self._requests[request.request_id] = state
        self._finished.pop(request.request_id, None)
        self._num_arrivals += 1
        for index in range(request.n):
            self._num_sequences += 1
            sequence = Sequence(
                seq_id=SeqId(self._num_sequences),
                request=request,
                index=index,
                order=(self._num_arrivals, index),
                token_ids=list(request.prompt_token_ids),
                keys=list(keys),
                is_keyed=config.prefix_caching,
                table=BlockTable(config.block_size),
                max_known_tokens=num_tokens,
            )
            state.sequences.append(sequence)
            self._sequences[sequence.seq_id] = sequence
            self._waiting.insert(sequence)
        return tuple(sequence.seq_id for sequence in state.sequences)

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
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            self._end(sequence)

    def num_device_tokens(self, root_key: BlockKey, prompt_keys: Seq[BlockKey]) -> int:
        """Tokens of a prompt that are on the device now, for placement. Changes nothing."""
        return len(self._pool.index.match(prompt_keys)) * self.config.block_size

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
        state = self._requests[request_id]
        prefix = self._pool.index.match(self._loadable_keys(state))
        num_taken = len(keys) + self._pool.num_cached_of(prefix)
        if num_taken + len(self._running) > self._pool.num_available:
            return None
        plan = self._transfers.begin_load(prefix, keys, self._applied_step)
        if plan is not None:
            state.load_id = plan.load_id
            self._loading[plan.load_id] = state
        return plan

    def end_load(self, load_id: int, num_loaded: int, num_by_tier: dict[str, int]) -> None:
        """The first num_loaded blocks hold the KV of their keys; the others go back. Unknown load ids are fine."""
        self._transfers.end_load(load_id, num_loaded)
        state = self._loading.pop(load_id, None)
        if state is not None:
            state.load_id = None
            state.loaded_by_tier = {tier: num * self.config.block_size for tier, num in num_by_tier.items() if num}

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step.

        Returns:
            None: nothing can run before the next apply, add, end_load or end_save.
        """
        batch = Batch(self._planned_step + 1, self.config.max_num_batched_tokens)
        self._pool.planned_step = batch.step_id
        self._plan_decodes(batch)
        self._plan_prefills(batch)
        if not batch.is_short_of_blocks:
            self._admit(batch, now_s)
        self._pool.release(batch.copy_sources)
        if not batch.planned:
            self._pool.planned_step = self._planned_step
            return None
        self._commit(batch)
        plan = batch.plan(self._dropped)
        self._dropped = []
        return plan

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
        token_ids = {sample.seq_id: sample.token_id for sample in sampled}
        updates = []
        failures = dict(errors)
        void: set[SeqId] = set()
        for chunk in step.chunks:
            sequence = chunk.sequence
            token_id = token_ids.get(sequence.seq_id) if chunk.is_sampling else None
            if sequence.status is SequenceStatus.FINISHED or sequence.attempt != chunk.attempt:
                self._num_discarded_tokens += token_id is not None
                void.add(sequence.seq_id)
                continue
            sequence.num_in_flight_steps -= 1
            sequence.num_in_flight_tokens -= chunk.is_sampling
            if sequence.seq_id in errors:
                continue
            if sequence.status is SequenceStatus.RUNNING:
                sequence.num_applied_tokens += chunk.num_tokens
                if self.config.save_blocks:
                    self._offer_saves(sequence)
            if token_id is not None:
                updates.append(self._take_token(sequence, token_id))
            elif chunk.is_sampling:
                failures[sequence.seq_id] = f"the executor returned no token in step {step_id}"
        for seq_id, message in failures.items():
            self._void_blocks(step, seq_id)
            failed = self._sequences.get(seq_id)
            if failed is not None and seq_id not in void:
                self._end(failed)
                self._dropped = [dropped for dropped in self._dropped if dropped != seq_id]  # the executor has dropped it
                updates.append(_update(failed, finish_reason=FinishReason.ERROR, error_message=message))
        return updates

    def expire(self, now_s: float) -> list[SequenceUpdate]:
        """Ends waiting requests whose queue_deadline_s has passed, with QUEUE_TIMEOUT."""
        updates = []
        for state in list(self._requests.values()):
            deadline_s = state.request.queue_deadline_s
            if state.is_queued and deadline_s is not None and deadline_s < now_s:
                for sequence in list(state.sequences):
                    self._end(sequence)
                    updates.append(_update(sequence, finish_reason=FinishReason.QUEUE_TIMEOUT))
        return updates

    def take_saves(self, max_blocks: int) -> SavePlan | None:
        """Blocks that became full and computed since the last call and are not in the store; holds them until end_save."""
        return self._transfers.take_saves(max_blocks)

    def end_save(self, save_id: int) -> None:
        """The executor has read the blocks of a SavePlan. Unknown ids are fine."""
        self._transfers.end_save(save_id)

    def cached_tokens(self, request_id: RequestId) -> dict[str, int]:
        """Prompt tokens of a request that were not computed for it, by tier: "device", "shm", "disk", "redis".

        Tiers with none are left out. Known from the first admission until some thousand requests after its end.
        """
        state = self._requests.get(request_id) or self._finished.get(request_id)
        return dict(state.cached_by_tier) if state else {}

    def admitted_at_s(self, request_id: RequestId) -> float | None:
        """When the request first got a place in the batch; None if it has not. Known as long as cached_tokens."""
        state = self._requests.get(request_id) or self._finished.get(request_id)
        return state.admitted_at_s if state else None

    def flush_cache(self) -> int:
        """Forgets every cached block that no sequence uses.

        Returns:
            How many.
        """
        return self._pool.flush()

    def reset(self) -> None:
        """The executor is gone with all KV: every running sequence goes back to the queue, keeping its place and its tokens."""
        self._pool = BlockPool(self.config.num_blocks)
        self._transfers.restart(self._pool)
        self._outstanding.clear()
        self._dropped = []
        self._planned_step = self._applied_step = 0
        for state in self._loading.values():
            state.load_id = None
        self._loading.clear()
        for sequence in self._sequences.values():
            sequence.void_steps()
            if sequence.status is SequenceStatus.RUNNING:
                sequence.table.clear()
                sequence.become_waiting()
                self._waiting.insert(sequence)
        self._running.clear()

    def drain(self) -> list[Request]:
        """Takes out requests that were never admitted, in order, so that another executor can have them."""
        states = [state for state in self._requests.values() if state.is_queued]
        for state in states:
            for sequence in list(state.sequences):
                self._end(sequence)
        return [state.request for state in states]

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def stats(self) -> SchedulerStats:
        """Gauges and counters."""
        pool = self._pool
        largest_free_run, mean_run_length = pool.free_run_figures()
        num_empty_slots = sum(max(0, s.table.num_slots - s.num_known_tokens) for s in self._running)
        num_shared_by_transfer = sum(pool.num_refs(block_id) == 2 for block_id in set(self._transfers.held_blocks()))
        return SchedulerStats(
            num_waiting_requests=self._waiting.num_requests,
            num_waiting_tokens=self._waiting.num_tokens,
            num_running_requests=len(self._requests) - self._waiting.num_requests,
            num_running_sequences=len(self._running),
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used,
            num_shared_blocks=pool.num_shared - num_shared_by_transfer,
            num_cached_blocks=pool.num_cached,
            num_free_blocks=pool.num_free,
            largest_free_run=largest_free_run,
            mean_run_length=mean_run_length,
            kv_waste_ratio=num_empty_slots / (pool.num_used * self.config.block_size) if pool.num_used else 0.0,
            num_preemptions=self._num_preemptions,
            num_discarded_tokens=self._num_discarded_tokens,
            cached_tokens_by_tier=dict(self._cached_tokens),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError with the values when bookkeeping contradicts itself."""
        self._pool.check_integrity()
        num_refs = Counter(self._transfers.held_blocks())
        for sequence in self._running:
            sequence.check_integrity()
            num_refs.update(sequence.table.block_ids)
            next_block = sequence.num_planned_tokens // self.config.block_size
            for block_id in sequence.table.block_ids[next_block:]:
                assert self._pool.num_refs(block_id) == 1, f"block {block_id} will be written and is shared"
                assert self._pool.index.key_of(block_id) is None, f"block {block_id} will be written and is listed"
        for block_id in map(BlockId, range(self._pool.num_blocks)):
            expected, counted = num_refs[block_id], self._pool.num_refs(block_id)
            assert expected == counted, f"block {block_id} has {expected} references, counted {counted}"
        running = {sequence.seq_id for sequence in self._running}
        waiting = {sequence.seq_id for sequence in self._waiting}
        assert running | waiting == set(self._sequences), f"{running=} and {waiting=} are not all of {set(self._sequences)}"
        assert not running & waiting, f"{running & waiting} are running and waiting"
        assert len(running) <= self._max_running, f"{len(running)} sequences run, at most {self._max_running} may"
        assert [s.order for s in self._running] == sorted(s.order for s in self._running), "running sequences are out of order"
        owners = set(self._pool.index.promised_by().values()) - {None}
        assert owners <= running, f"{owners - running} promised keys, but do not run"
        queued = [state for state in self._requests.values() if state.is_queued]
        assert len(queued) == self._waiting.num_requests, f"{len(queued)} queued, counted {self._waiting.num_requests}"
        num_tokens = sum(len(state.request.prompt_token_ids) for state in queued)
        assert num_tokens == self._waiting.num_tokens, f"{num_tokens} tokens queued, counted {self._waiting.num_tokens}"

    def _plan_decodes(self, batch: Batch) -> None:
        """Every sequence that lacks one token, oldest first. Those that grow may preempt younger ones."""
        for sequence in list(self._running):
            if batch.num_tokens_left == 0:
                break
            num_known = len(sequence.token_ids) + sequence.num_in_flight_tokens
            if (
                num_known - sequence.num_planned_tokens != 1
                or num_known == sequence.max_known_tokens  # all its tokens are drawn
                or sequence.status is not SequenceStatus.RUNNING
            ):
                continue
            if num_known <= sequence.table.num_slots or self._grow(sequence, batch):
                batch.add_chunk(sequence, 1)

    def _plan_prefills(self, batch: Batch) -> None:
        """Next chunks of sequences that were admitted before."""
        for sequence in self._running:
            if batch.num_tokens_left == 0:
                break
            if sequence.num_known_tokens - sequence.num_planned_tokens > 1:
                self._add_prefill_chunk(batch, sequence)

    def _add_prefill_chunk(self, batch: Batch, sequence: Sequence) -> None:
        num_uncomputed = sequence.num_known_tokens - sequence.num_planned_tokens
        batch.add_chunk(sequence, min(num_uncomputed, batch.num_tokens_left, self.config.max_chunk_tokens))

    def _grow(self, sequence: Sequence, batch: Batch) -> bool:
        """Appends a block to a sequence, taking it from younger ones if need be."""
        table = sequence.table
        while (block_ids := self._pool.allocate(1, after=table.block_ids[-1])) is None:
            batch.is_short_of_blocks = True
            victim = choose_victim(self._running[self._running.index(sequence) + 1 :])
            if victim is None:
                return False
            self._preempt(victim)
        table.block_ids += block_ids
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks. Tokens in flight still count: it is not admitted again before they are in."""
        self._num_preemptions += 1
        self._take_from_batch(sequence)
        sequence.is_protected = True
        self._waiting.insert(sequence)

    def _take_from_batch(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._pool.index.withdraw(sequence.keys[sequence.num_listed :], sequence.seq_id)
        self._pool.release(sequence.table.clear())
        self._dropped.append(sequence.seq_id)
        sequence.become_waiting()

    def _admit(self, batch: Batch, now_s: float) -> None:
        """Waiting sequences in order, as far as tokens, places and blocks last.

        One that waits for a load or for what others compute is passed over; one that lacks blocks, or whose steps from before
        a preemption are still in flight, holds up those behind it, so that they cannot starve it.
        """
        if batch.num_tokens_left == 0 or len(self._running) >= self._max_running:
            return
        index = self._pool.index
        for sequence in list(self._waiting):
            state = self._requests[sequence.request.request_id]
            if state.load_id is not None or (sequence.awaited_key is not None and index.is_promised(sequence.awaited_key)):
                continue
            if sequence.num_in_flight_steps:
                break
            found = find_attachment(sequence, state.sequences, index)
            if isinstance(found, Awaited):
                sequence.awaited_key = found.key
                continue
            attachment = self._affordable(sequence, found)
            if attachment is None:
                break
            self._start(batch, sequence, attachment)
            if state.is_queued:
                self._waiting.count_out(sequence.num_prompt_tokens)
                state.note_admission(now_s, attachment.num_tokens)
                self._cached_tokens.update(state.cached_by_tier)
            if batch.num_tokens_left == 0 or len(self._running) >= self._max_running:
                break

    def _affordable(self, sequence: Sequence, attachment: Attachment) -> Attachment | None:
        """What can be taken over with the blocks that are there: a copy needs one more than computing does."""
        size = self.config.block_size
        for option in (attachment, attachment.without_copy(size)):
            taken = option.shared if option.copy_source is None else [*option.shared, option.copy_source]
            num_new = -(-len(sequence.token_ids) // size) - len(option.shared)
            if num_new + self._pool.num_cached_of(taken) + len(self._running) <= self._pool.num_available:
                return option
        return None

    def _start(self, batch: Batch, sequence: Sequence, attachment: Attachment) -> None:
        """Moves a waiting sequence into the batch, with blocks for all its known tokens."""
        pool, shared = self._pool, attachment.shared
        for block_id in shared:
            pool.retain(block_id)
        if attachment.copy_source is not None:
            pool.retain(attachment.copy_source)  # until the plan is complete
        num_new = -(-len(sequence.token_ids) // self.config.block_size) - len(shared)
        block_ids = pool.allocate(num_new, after=shared[-1] if shared else None)
        assert block_ids is not None, f"{num_new} blocks were counted on, {pool.num_available} are available"
        if attachment.copy_source is not None:
            batch.copies.append(BlockCopy(attachment.copy_source, block_ids[0]))
        if attachment.num_tokens:
            batch.attached.append(sequence)
        self._waiting.remove(sequence)
        bisect.insort(self._running, sequence, key=lambda s: s.order)
        sequence.become_running(shared + block_ids, len(shared), attachment.num_tokens)
        pool.index.promise(sequence.keys[sequence.num_listed :], sequence.seq_id)
        batch.new_sequences.append(sequence.announce())
        self._add_prefill_chunk(batch, sequence)

    def _commit(self, batch: Batch) -> None:
        """The step is planned: what it computes may be built on by the next."""
        step = batch.step()
        for chunk in batch.planned:
            sequence = chunk.sequence
            sequence.num_planned_tokens += chunk.num_tokens
            sequence.num_in_flight_steps += 1
            sequence.num_in_flight_tokens += chunk.is_sampling
            if sequence.num_listed < len(sequence.keys):
                self._list_blocks(sequence, step)
        self._outstanding.append(step)
        self._planned_step = batch.step_id

    def _list_blocks(self, sequence: Sequence, step: PlannedStep | None) -> None:
        """Lets others find blocks whose tokens are all known and planned; step is the newest in flight."""
        index = self._pool.index
        num_full = min(len(sequence.keys), sequence.num_planned_tokens // self.config.block_size)
        if num_full <= sequence.num_listed:
            return
        keys = sequence.keys[sequence.num_listed : num_full]
        index.withdraw(keys, sequence.seq_id)
        for key, block_id in zip(keys, sequence.table.block_ids[sequence.num_listed : num_full], strict=True):
            if index.add(key, block_id) and step is not None:
                step.listed.append((block_id, sequence))
        sequence.num_listed = num_full

    def _offer_saves(self, sequence: Sequence) -> None:
        num_full = min(sequence.num_listed, sequence.num_applied_tokens // self.config.block_size)
        for position in range(sequence.num_offered, num_full):
            block_id = sequence.table.block_ids[position]
            if self._pool.index.key_of(block_id) == sequence.keys[position]:
                self._pool.offer_save(block_id)
        sequence.num_offered = max(sequence.num_offered, num_full)

    def _take_token(self, sequence: Sequence, token_id: int) -> SequenceUpdate:
        reason = sequence.append(token_id)
        sequence.is_protected = False
        if sequence.status is SequenceStatus.RUNNING and sequence.num_listed < len(sequence.keys):
            self._list_blocks(sequence, self._outstanding.newest)
        if reason is None:
            return _update(sequence, token_ids=(token_id,))
        self._end(sequence)
        stop_token_id = token_id if reason is FinishReason.STOP else None
        return _update(sequence, token_ids=(token_id,), finish_reason=reason, stop_token_id=stop_token_id)

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
            self._take_from_batch(sequence)
            self._waiting.insert(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Takes a sequence out, whatever it is doing; its request too, if it was the last sample."""
        if sequence.status is SequenceStatus.RUNNING:
            self._take_from_batch(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.seq_id]
        state = self._requests[sequence.request.request_id]
        state.sequences.remove(sequence)
        if not state.sequences:
            self._end_request(state)

    def _end_request(self, state: RequestState) -> None:
        request_id = state.request.request_id
        del self._requests[request_id]
        if state.is_queued:
            self._waiting.count_out(len(state.request.prompt_token_ids))
        self._finished[request_id] = state
        if len(self._finished) > NUM_REMEMBERED_REQUESTS:
            self._finished.popitem(last=False)

    def _loadable_keys(self, state: RequestState) -> list[BlockKey]:
        return state.prompt_keys[: (len(state.request.prompt_token_ids) - 1) // self.config.block_size]


def _update(
    sequence: Sequence,
    *,
    token_ids: tuple[int, ...] = (),
    finish_reason: FinishReason | None = None,
    stop_token_id: int | None = None,
    error_message: str = "",
) -> SequenceUpdate:
    return SequenceUpdate(
        request_id=sequence.request.request_id,
        seq_id=sequence.seq_id,
        index=sequence.index,
        token_ids=token_ids,
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
        error_message=error_message,
    )
