"""Continuous batching for one executor: what runs in the next step, on which blocks. Pure: time is an argument.

Knows requests, sequences, block tables and the device pool. Does not know the wire, text, tiers below the device, or other
executors. One Scheduler per executor; the shell drives it:

    add -> [prefix of the store: begin_load .. end_load] -> schedule -> apply -> ... -> update with a finish reason

Run-ahead: schedule may be called again before apply of the step before. A decode that is planned on top of an unapplied
step counts on a token that only the executor knows; if apply finds that the sequence had ended, the extra token is discarded.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.ids import BlockKey, RequestId, SeqId
from scheduler_svc.core.plan import LoadPlan, SampledToken, SavePlan, SchedulerStats, SequenceUpdate, StepPlan
from scheduler_svc.core.request import FinishReason, Request


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
        raise NotImplementedError

    def add(self, request: Request) -> tuple[SeqId, ...]:
        """Queues a request.

        Returns:
            The ids of its n samples, in order of index. All of them appear in updates.

        Raises:
            QueueFull: the queue is at one of its bounds; retry_after_s is set.
            KvPoolTooSmall: prompt and max_tokens of one sample need more blocks than the pool has.
            DuplicateRequest: the request_id is known and not finished.
        """
        raise NotImplementedError

    def cancel(self, request_id: RequestId, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """Ends all samples of a request, in whatever state. Its blocks are free for the very next plan; no update follows.

        Returns:
            False: no such request.
        """
        raise NotImplementedError

    def finish_sequence(self, seq_id: SeqId) -> None:
        """Ends one sample because of its text (a stop string). No update follows. Unknown or ended ids are fine."""
        raise NotImplementedError

    def num_device_tokens(self, root_key: BlockKey, prompt_keys: Seq[BlockKey]) -> int:
        """Tokens of a prompt that are on the device now, for placement. Changes nothing."""
        raise NotImplementedError

    def missing_keys(self, request_id: RequestId) -> tuple[BlockKey, ...]:
        """Keys of a waiting request's full prompt blocks after those that the device holds, for a look-up in the store.

        Empty when the request is not waiting any more. A block whose last token is the prompt's last token is left out: at
        least one token has to be computed.
        """
        raise NotImplementedError

    def begin_load(self, request_id: RequestId, num_blocks: int) -> LoadPlan | None:
        """Takes device blocks for the first num_blocks of missing_keys and holds the request back until end_load.

        Returns:
            None: not waiting any more, nothing to load, or no blocks free now; the request then simply recomputes.
        """
        raise NotImplementedError

    def end_load(self, load_id: int, num_loaded: int, num_by_tier: dict[str, int]) -> None:
        """The first num_loaded blocks hold the KV of their keys; the others go back. Unknown load ids are fine."""
        raise NotImplementedError

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step.

        Returns:
            None: nothing can run before the next apply, add or end_load.
        """
        raise NotImplementedError

    def apply(self, step_id: int, sampled: Seq[SampledToken], errors: dict[SeqId, str]) -> list[SequenceUpdate]:
        """Takes in a step's result; steps come back in the order of their plans.

        Args:
            step_id: of the plan.
            sampled: one per chunk that reached the end of its sequence's known tokens.
            errors: sequences that failed alone, with the reason.
        """
        raise NotImplementedError

    def expire(self, now_s: float) -> list[SequenceUpdate]:
        """Ends waiting requests whose queue_deadline_s has passed, with QUEUE_TIMEOUT."""
        raise NotImplementedError

    def take_saves(self, max_blocks: int) -> SavePlan | None:
        """Blocks that became full and computed since the last call and are not in the store; holds them until end_save."""
        raise NotImplementedError

    def end_save(self, save_id: int) -> None:
        """The executor has read the blocks of a SavePlan."""
        raise NotImplementedError

    def cached_tokens(self, request_id: RequestId) -> dict[str, int]:
        """Prompt tokens of a request that were not computed for it, by tier: "device", "shm", "disk", "redis"."""
        raise NotImplementedError

    def admitted_at_s(self, request_id: RequestId) -> float | None:
        """When the request first got a place in the batch; None if it has not."""
        raise NotImplementedError

    def flush_cache(self) -> int:
        """Forgets every cached block that no sequence uses.

        Returns:
            How many.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """The executor is gone with all KV: every running sequence goes back to the queue, keeping its place and its tokens."""
        raise NotImplementedError

    def drain(self) -> list[Request]:
        """Takes out requests that were never admitted, in order, so that another executor can have them."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        raise NotImplementedError

    def stats(self) -> SchedulerStats:
        """Gauges and counters."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raises AssertionError with the values when bookkeeping contradicts itself."""
        raise NotImplementedError
