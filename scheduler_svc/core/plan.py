"""What a scheduler tells its executor, and what it tells the edge. Plain data that mirrors octavo.executor.v1; no logic.

What there is hundreds of in a step is a tuple: those are made several times as fast as frozen dataclasses.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from common.ids import BlockId, BlockKey, RequestId, SeqId
from scheduler_svc.core.request import FinishReason, SamplingParams, StopConditions
from scheduler_svc.core.step_time import StepWork


@dataclass(frozen=True, slots=True)
class NewSequence:
    """Everything about a sequence, sent once. See octavo.executor.v1.NewSequence."""

    seq_id: SeqId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[BlockId, ...]
    sampling: SamplingParams
    stop: StopConditions


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one device block onto another before the step."""

    source: BlockId
    destination: BlockId


class Chunk(NamedTuple):
    """The next num_tokens known tokens of a sequence, and the blocks appended for them."""

    seq_id: SeqId
    num_tokens: int
    new_block_ids: tuple[BlockId, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as a delta: drops, then new sequences, then copies, then chunks (decodes first).

    Attributes:
        work: what it computes, for those who predict its time; not sent.
    """

    step_id: int
    dropped_seq_ids: tuple[SeqId, ...] = ()
    new_sequences: tuple[NewSequence, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    work: StepWork = field(default_factory=StepWork)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Fill these device blocks from the store; a chain in order of position, and the key of each.

    Attributes:
        after_step: a load runs beside the steps, and this one may still touch the blocks: not before its result is in.
    """

    load_id: int
    keys: tuple[BlockKey, ...]
    block_ids: tuple[BlockId, ...]
    after_step: int = 0


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Write these computed device blocks to the store, under the key of each; they stay unchanged until end_save."""

    save_id: int
    keys: tuple[BlockKey, ...]
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class SampleId:
    """Which sample of which request: what is the same in all news of a sequence."""

    request_id: RequestId
    seq_id: SeqId
    index: int


@dataclass(slots=True)
class SequenceUpdate:
    """News of one sample for the edge.

    Attributes:
        index: which of the request's n samples.
        token_ids: new output tokens, a stop token included.
        finish_reason: None: it goes on.
        stop_token_id: the stop token that ended it.
    """

    request_id: RequestId
    seq_id: SeqId
    index: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error_message: str = ""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges of now and counters since start of one executor's scheduler; the fields of octavo.scheduler.v1.ExecutorLoad.

    Attributes:
        num_waiting_tokens: prompt tokens of waiting requests.
        num_recomputed_tokens: computed ones that preempted sequences did not find again when it was their turn.
        kv_waste_ratio: slots of used blocks without a token, as a share of the slots of used blocks; shared blocks count once.
    """

    num_waiting_requests: int = 0
    num_waiting_tokens: int = 0
    num_running_requests: int = 0
    num_running_sequences: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_shared_blocks: int = 0
    num_cached_blocks: int = 0
    num_free_blocks: int = 0
    largest_free_run: int = 0
    mean_run_length: float = 0.0
    kv_waste_ratio: float = 0.0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_discarded_tokens: int = 0
    cached_tokens_by_tier: dict[str, int] = field(default_factory=dict)
