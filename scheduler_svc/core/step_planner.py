"""What runs in a step: the policy of continuous batching.

    1. decodes                       every running sequence that lacks one token, oldest first
    2. prefills that were begun      next chunks, oldest first
    3. admissions                    waiting sequences, oldest first

until the token budget is spent, so that a long prompt never holds up the others' next token; beside decodes it is smaller
(prefill_budget.py). A sequence is admitted when blocks
for all its known tokens are there, and one more for each running sequence; from then on only its outputs need blocks, and only
a decode can run short. Knows requests and sequences. Does not know what becomes of a step: that is the scheduler's business.
"""

from collections import Counter

from scheduler_svc.core.attachment import Awaited, find_attachment
from scheduler_svc.core.batch import Batch
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.preemption import choose_victim
from scheduler_svc.core.prefill_budget import PrefillBudget
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.running_set import RunningSet
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.waiting_queue import WaitingQueue


class StepPlanner:
    """See the module's first lines."""

    def __init__(self, config: SchedulerConfig, requests: RequestTable, waiting: WaitingQueue, prefill_budget: PrefillBudget):
        self.num_preemptions = 0
        self.cached_tokens_by_tier: Counter[str] = Counter()
        """Prompt tokens that admitted requests did not have to compute."""
        self._max_chunk_tokens = config.max_chunk_tokens
        self._requests = requests
        self._waiting = waiting
        self._prefill_budget = prefill_budget

    def fill(self, batch: Batch, running: RunningSet, now_s: float) -> None:
        """Puts into an empty batch what runs next. Moves sequences between waiting and running as needed."""
        self._add_decodes(batch, running)
        batch.prefer(self._prefill_budget.num_tokens(batch.work(), self._waiting.num_tokens))
        for sequence in running:
            if sequence.num_known_tokens - sequence.num_planned_tokens > 1:
                self._add_chunk(batch, sequence)
        self._admit(batch, running, now_s)

    def _add_decodes(self, batch: Batch, running: RunningSet) -> None:
        """Those that grow may preempt younger ones. One that finds no block is left out of the step."""
        for sequence in running:
            if batch.num_tokens_left == 0:
                break
            num_known = len(sequence.token_ids) + sequence.num_in_flight_tokens
            if (
                num_known - sequence.num_planned_tokens != 1
                or num_known == sequence.max_known_tokens  # all its tokens are drawn
                or sequence.status is not SequenceStatus.RUNNING
            ):
                continue
            if num_known <= sequence.table.num_slots or self._grow(sequence, running):
                batch.add_chunk(sequence, 1)

    def _add_chunk(self, batch: Batch, sequence: Sequence) -> None:
        num_tokens = batch.room_for(min(sequence.num_known_tokens - sequence.num_planned_tokens, self._max_chunk_tokens))
        if num_tokens:
            batch.add_chunk(sequence, num_tokens)

    def _grow(self, sequence: Sequence, running: RunningSet) -> bool:
        """Gets a sequence another block, from younger ones if need be. Their tokens in flight still count."""
        while not running.grow(sequence):
            victim = choose_victim(running.younger_than(sequence))
            if victim is None:
                return False
            running.stop(victim)
            victim.is_protected = True
            self._waiting.insert(victim)
            self.num_preemptions += 1
        return True

    def _admit(self, batch: Batch, running: RunningSet, now_s: float) -> None:
        """Waiting sequences in order, as far as tokens, places and blocks last.

        One that waits for a load or for what others compute is passed over; one that lacks blocks, or whose steps from before
        a preemption are still in flight, holds up those behind it, so that they cannot starve it.
        """
        index = running.index
        for sequence in self._waiting:
            if batch.num_tokens_left == 0 or running.is_full:
                break
            state = self._requests.state_of(sequence)
            if state.load_id is not None or (sequence.awaited_key is not None and index.is_promised(sequence.awaited_key)):
                continue
            if sequence.num_in_flight_steps:
                break
            found = find_attachment(sequence, state.sequences, index)
            if isinstance(found, Awaited):
                sequence.awaited_key = found.key
                continue
            attachment = running.affordable(sequence, found)
            if attachment is None:
                break
            if not batch.room_for(min(sequence.num_known_tokens - attachment.num_tokens, self._max_chunk_tokens)):
                break
            self._waiting.remove(sequence)
            batch.add_sequence(sequence, running.start(sequence, attachment))
            self._add_chunk(batch, sequence)
            if state.is_queued:
                self._waiting.count_out(sequence.num_prompt_tokens)
                state.note_admission(now_s, min(attachment.num_tokens, sequence.num_prompt_tokens))
                self.cached_tokens_by_tier.update(state.cached_by_tier)
