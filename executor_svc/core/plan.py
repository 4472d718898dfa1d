"""What one step asks for, as plain data that mirrors octavo.executor.v1.StepPlan. Knows no wire, no tensors; no logic."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from common.ids import BlockId, SeqId

SamplingT = TypeVar("SamplingT")


@dataclass(frozen=True, slots=True)
class NewSequence(Generic[SamplingT]):
    """Everything about a sequence, sent once.

    Attributes:
        token_ids: prompt, and after a preemption what was generated before; at least one.
        num_prompt_tokens: how many of token_ids are the prompt.
        num_computed_tokens: tokens whose KV is in block_ids already; less than len(token_ids).
        block_ids: in order of position.
        sampling: handed to the sampler unread.
    """

    seq_id: SeqId
    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: Sequence[BlockId]
    sampling: SamplingT


@dataclass(slots=True)  # made for every sequence in every step, which takes three times as long if it is frozen
class Chunk:
    """The next num_tokens known tokens of a sequence, and the blocks appended for them. Nobody changes it."""

    seq_id: SeqId
    num_tokens: int
    new_block_ids: Sequence[BlockId] = ()


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[SamplingT]):
    """One step as a delta, applied in the order drops, new sequences, block copies, chunks.

    Attributes:
        step_id: 1 for a session's first plan, no gaps.
        block_copies: (source, destination) of whole blocks, carried out one after the other.
    """

    step_id: int
    dropped_seq_ids: Sequence[SeqId] = ()
    new_sequences: Sequence[NewSequence[SamplingT]] = ()
    block_copies: Sequence[tuple[BlockId, BlockId]] = ()
    chunks: Sequence[Chunk] = ()


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """A sequence that cannot go on, and why."""

    seq_id: SeqId
    message: str


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a plan may ask for.

    Attributes:
        num_blocks, block_size: of the device pool; block_size in tokens.
        max_num_seqs: most sequences alive at once.
        max_num_batched_tokens: most tokens of one step.
        max_model_len: most tokens of a sequence whose KV is computed.
        vocab_size: token ids are less than this.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int = field(default=2**31)
