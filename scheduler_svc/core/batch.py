"""A step while it is being put together: what it may still carry, and what is in it so far."""

from common.ids import BlockId, SeqId
from scheduler_svc.core.decodes import Decodes
from scheduler_svc.core.plan import BlockCopy, Chunk, NewSequence, StepPlan
from scheduler_svc.core.sequence import PlannedChunk, Sequence
from scheduler_svc.core.step_time import StepWork


class Batch:
    """See the module's first line.

    Attributes:
        with_blocks: chunks of those of the decodes that got a block for this step.
        planned: chunks of sequences that are none of the decodes.
        attached: sequences that begin in this step with a prefix computed by others.

    Args:
        step_id: of the plan.
        num_tokens: the step's token budget.
    """

    def __init__(self, step_id: int, num_tokens: int):
        self.step_id = step_id
        self.num_tokens_left = num_tokens
        self._num_preferred_left: int | None = None
        self.with_blocks: dict[SeqId, Chunk] = {}
        self.planned: list[PlannedChunk] = []
        self.attached: list[Sequence] = []
        self._new_sequences: list[NewSequence] = []
        self._copies: list[BlockCopy] = []
        self._chunks: list[Chunk] = []
        self._num_prefill_tokens = self._num_attended = self._num_decodes = self._num_context_tokens = 0

    @property
    def copy_sources(self) -> list[BlockId]:
        """Blocks that must not be given to others in this step."""
        return [copy.source for copy in self._copies]

    def makes(self, block_id: BlockId | None) -> bool:
        """Whether a block is written by a copy of this step, so that it cannot be copied in the same one."""
        return any(copy.destination == block_id for copy in self._copies)

    def add_sequence(self, sequence: Sequence, copy: BlockCopy | None) -> None:
        """Announces a sequence that has just started, and the copy of a block that it needs."""
        self._new_sequences.append(sequence.announce())
        if copy is not None:
            self._copies.append(copy)
        if sequence.num_planned_tokens:
            self.attached.append(sequence)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it."""
        return not self._num_decodes and not self.planned

    def add_decodes(self, decodes: Decodes) -> None:
        """Puts a token of each of them into the step, which is empty."""
        self._num_decodes = len(decodes)
        self._num_context_tokens = decodes.num_context_tokens
        self.num_tokens_left -= len(decodes)

    def add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Puts the next num_tokens known tokens of a sequence into the step. Its blocks are in its table."""
        begin = sequence.num_planned_tokens
        end = begin + num_tokens
        self._chunks.append(Chunk(sequence.seq_id, num_tokens, sequence.table.take_unsent(end)))
        self.planned.append(PlannedChunk(sequence, num_tokens, end == sequence.num_known_tokens))
        self.num_tokens_left -= num_tokens
        if num_tokens == 1:
            self._num_decodes += 1
            self._num_context_tokens += end
        else:
            self._num_prefill_tokens += num_tokens
            if self._num_preferred_left is not None:
                self._num_preferred_left = max(0, self._num_preferred_left - num_tokens)
            self._num_attended += _num_attended(begin, num_tokens)

    def drop(self, sequence: Sequence) -> None:
        """Takes out what the step would have computed for a sequence that was running before and makes room. None is fine."""
        if sequence.is_decoding:
            self.num_tokens_left += 1
            self._num_decodes -= 1
            self._num_context_tokens -= sequence.num_known_tokens
            return
        for i, chunk in enumerate(self.planned):
            if chunk.sequence is sequence:
                del self.planned[i], self._chunks[i]
                self.num_tokens_left += chunk.num_tokens
                if chunk.num_tokens == 1:
                    self._num_decodes -= 1
                    self._num_context_tokens -= sequence.num_planned_tokens + 1
                else:
                    self._num_prefill_tokens -= chunk.num_tokens
                    self._num_attended -= _num_attended(sequence.num_planned_tokens, chunk.num_tokens)
                return

    def prefer(self, num_prefill_tokens: int) -> None:
        """Prompts should not take more of the step than that; see room_for."""
        if num_prefill_tokens < self.num_tokens_left:
            self._num_preferred_left = num_prefill_tokens

    def room_for(self, num_tokens: int) -> int:
        """How many of a prompt's num_tokens the step takes.

        Beyond what prompts should take a prompt is not cut, because the cut costs it a step and the device attention over what
        lies before it: the first prompt goes whole, if that is possible at all, and others wait for the next step.
        """
        preferred = self._num_preferred_left
        if preferred is None:
            return min(num_tokens, self.num_tokens_left)
        # The single last token of a prompt counts as a decode: it takes from the step and not from what is preferred.
        preferred = min(preferred, self.num_tokens_left)
        if num_tokens <= preferred or self._num_prefill_tokens:
            return num_tokens if num_tokens <= preferred else 0
        return num_tokens if num_tokens <= self.num_tokens_left else preferred

    def work(self) -> StepWork:
        """What the step computes."""
        return StepWork(self._num_prefill_tokens, self._num_attended, self._num_decodes, self._num_context_tokens)

    def plan(self, decodes: tuple[Chunk, ...], dropped_seq_ids: list[SeqId]) -> StepPlan:
        """What the executor is told; decodes: their chunks."""
        return StepPlan(
            step_id=self.step_id,
            dropped_seq_ids=tuple(dropped_seq_ids),
            new_sequences=tuple(self._new_sequences),
            block_copies=tuple(self._copies),
            chunks=(*decodes, *self._chunks) if self._chunks else decodes,
            work=self.work(),
        )


def _num_attended(begin: int, num_tokens: int) -> int:
    return num_tokens * begin + num_tokens * (num_tokens + 1) // 2
