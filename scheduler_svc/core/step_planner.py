"""What runs in a step: the frame of continuous batching. Who is first and who makes room is the policy's to say.

    1. decodes                       every running sequence that lacks one token, in order of rank
    2. prefills that were begun      next chunks, in order of rank
    3. admissions                    waiting sequences, in the policy's order

until the token budget is spent, so that a long prompt never holds up the others' next token; beside decodes it is smaller
(prefill_budget.py). Who waits in a more urgent tier comes before prefills that were begun in others. A sequence is admitted when
blocks for all its known tokens are there, and one more for each running sequence; from then on only its outputs need blocks, and
only a decode can run short. If seats, tokens or blocks are not there, running sequences of less urgent tiers make room.
Knows requests and sequences. Does not know what becomes of a step: that is the scheduler's business.
"""

from collections import Counter

from scheduler_svc.core.admission import Admission
from scheduler_svc.core.attachment import Attachment, Awaited, find_attachment
from scheduler_svc.core.batch import Batch
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.plan import Chunk
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.prefill_budget import PrefillBudget
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.running_set import RunningSet
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.session import Session
from scheduler_svc.core.waiting_queue import WaitingQueue

_MOST_PASSED_OVER = 64
"""A step that has something to do looks at no more sequences that cannot run yet."""


class StepPlanner:
    """See the module's first lines."""

    def __init__(
        self,
        config: SchedulerConfig,
        requests: RequestTable,
        waiting: WaitingQueue,
        admission: Admission,
        policy: Policy,
        prefill_budget: PrefillBudget,
    ):
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        """Planned tokens that preempted sequences lost and did not find again when it was their turn."""
        self.cached_tokens_by_tier: Counter[str] = Counter()
        """Prompt tokens that admitted requests did not have to compute."""
        self._max_chunk_tokens = config.max_chunk_tokens
        self._requests = requests
        self._waiting = waiting
        self._admission = admission
        self._policy = policy
        self._prefill_budget = prefill_budget
        self._step_s: float | None = None  # that decodes of the step want it to take at most
        self._has_stepped_aside = False  # in the step before

    def fill(self, batch: Batch, session: Session, now_s: float) -> None:
        """Puts into an empty batch what runs next. Moves sequences between waiting and running as needed."""
        running = session.running
        self._policy.begin_step(now_s)
        self._add_decodes(batch, running)
        self._step_s = running.decodes.tightest_target_s
        batch.prefer(self._prefill_budget.num_tokens(batch.work(), self._admission.num_tokens))
        self._waiting.wake(running.index)
        for sequence in list(running.begun):
            self._admit(batch, session, now_s, sequence.tier)
            num_tokens = self._num_chunk_tokens(batch, sequence, sequence.num_planned_tokens)
            if num_tokens and sequence.status is SequenceStatus.RUNNING:
                batch.add_chunk(sequence, num_tokens)
        self._admit(batch, session, now_s, None)
        if batch.is_empty and self._has_stepped_aside:  # there was no room for the prompt
            self._add_decodes(batch, running)

    def _add_decodes(self, batch: Batch, running: RunningSet) -> None:
        """Those that grow may preempt others behind them. One that finds no block is left out of the step, or steps aside."""
        prompt = self._step_aside(running)
        for sequence in running.short_of_blocks():
            if sequence.status is not SequenceStatus.RUNNING:  # preempted for one ahead of it
                continue
            if prompt is not None and self._policy.steps_aside(sequence, prompt):
                continue
            table, num_known = sequence.table, sequence.num_known_tokens
            if num_known > table.num_slots and not running.grow(sequence) and not self._make_way(sequence, running):
                running.stall(sequence)
                continue
            if not sequence.is_decoding:
                running.go_on(sequence)
            if table.num_sent < len(table.block_ids):
                batch.with_blocks[sequence.seq_id] = Chunk(sequence.seq_id, 1, table.take_unsent(num_known))
        batch.add_decodes(running.decodes)

    def _step_aside(self, running: RunningSet) -> Sequence | None:
        """Leaves decodes out of a step with a prompt that they step aside for, but not of two steps in a row.

        Returns:
            The prompt's sequence; None: nobody steps aside.
        """
        prompts = () if self._has_stepped_aside else (running.begun[0] if running.begun else None, self._policy.first())
        for prompt in prompts:
            is_any = False
            while prompt is not None and (last := running.decodes.last) is not None and self._policy.steps_aside(last, prompt):
                running.stall(last)
                is_any = True
            if is_any:
                self._has_stepped_aside = True
                return prompt
        self._has_stepped_aside = False
        return None

    def _num_chunk_tokens(self, batch: Batch, sequence: Sequence, begin: int) -> int:
        """How long the sequence's next chunk is in this step, behind tokens that are computed; 0: it has to wait."""
        num_tokens = batch.room_for(min(sequence.num_known_tokens - begin, self._max_chunk_tokens))
        if num_tokens <= 1:
            return num_tokens
        work = batch.work()
        times_empty = self._policy.longest_step(sequence)
        if times_empty is not None:
            num_tokens = self._prefill_budget.num_tokens_if_short(times_empty, work, begin, num_tokens)
        if num_tokens > 1 and self._step_s is not None:
            num_tokens = self._prefill_budget.num_tokens_within(self._step_s, work, begin, num_tokens)
        return num_tokens

    def _make_way(self, sequence: Sequence, running: RunningSet) -> bool:
        """Gets a sequence another block from others behind it. Their tokens in flight still count."""
        while not running.grow(sequence):
            victim = self._policy.choose_victim(running.behind(sequence))
            if victim is None:
                return False
            self._preempt(victim, running)
        return True

    def _preempt(self, victim: Sequence, running: RunningSet) -> None:
        self.num_preemptions += 1
        victim.num_lost_tokens = max(victim.num_lost_tokens, victim.num_planned_tokens)
        running.stop(victim)
        victim.protect()
        victim.num_preemptions += 1
        self._waiting.insert(victim)

    def _admit(self, batch: Batch, session: Session, now_s: float, before_tier: int | None) -> None:
        """Waiting sequences in order, as far as tokens, places and blocks last.

        One that waits for what others compute is set aside; one that lacks blocks, or whose steps from before a preemption
        are still in flight, holds up those behind it, so that they cannot starve it.

        Args:
            batch: to add to.
            session: to take them into.
            now_s: the time.
            before_tier: only tiers more urgent than this; None: all.
        """
        running, num_passed_over = session.running, 0
        while (sequence := self._policy.first()) is not None:
            if before_tier is not None and sequence.tier >= before_tier:
                return
            if session.outstanding.have(sequence):
                return
            if (batch.num_tokens_left == 0 or running.is_full) and not running.has_behind_tier(sequence.claim):
                return
            state = self._requests.state_of(sequence)
            found = find_attachment(sequence, state.sequences, running.index)
            if isinstance(found, Awaited):
                self._waiting.let_wait(sequence, found.key)
                num_passed_over += 1
                if num_passed_over >= _MOST_PASSED_OVER and not batch.is_empty:
                    return
                continue
            if batch.makes(found.copy_source):
                found = found.without_copy(sequence.table.block_size)
            attachment = running.affordable(sequence, found, is_loaded=state.has_loaded)
            if batch.num_tokens_left == 0 or running.is_full or attachment is None:
                if not self._make_room(batch, running, sequence, found):
                    return
                continue  # with another look: what it attaches to may have gone
            num_cached = attachment.num_tokens
            num_tokens = self._num_chunk_tokens(batch, sequence, num_cached)
            if not num_tokens:
                return
            self._policy.admit(sequence, sequence.num_known_tokens - num_cached, num_cached)
            self.num_recomputed_tokens += max(0, sequence.num_lost_tokens - num_cached)
            sequence.num_lost_tokens = 0
            state.has_loaded = False
            sequence.was_admitted = True
            batch.add_sequence(sequence, running.start(sequence, attachment))
            batch.add_chunk(sequence, num_tokens)
            if state.is_queued:
                self._admission.count_out(sequence.request)
                state.note_admission(now_s, min(num_cached, sequence.num_prompt_tokens))
                self.cached_tokens_by_tier.update(state.cached_by_tier)

    def _make_room(self, batch: Batch, running: RunningSet, sequence: Sequence, found: Attachment) -> bool:
        """One running sequence of a less urgent tier goes, if with others like it that is enough for a waiting one."""
        candidates = running.behind_tier(sequence.claim)
        if not running.would_suffice(sequence, found, candidates):
            return False
        victim = self._policy.choose_victim(candidates)
        if victim is None:
            return False
        batch.drop(victim)
        self._preempt(victim, running)
        return True
