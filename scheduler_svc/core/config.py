"""Limits of one scheduler core. Plain data; where they come from is the shell's business."""

from dataclasses import dataclass

from scheduler_svc.core.tenants import EQUALS, Tenants


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one executor and of its queue.

    Attributes:
        num_blocks, block_size, max_num_seqs, max_num_batched_tokens: of the executor, see octavo.executor.v1.ExecutorInfo.
        max_chunk_tokens: most prompt tokens of one sequence in one step.
        max_waiting_requests, max_waiting_tokens, max_wait_s, tenants: bounds of the queue, see admission.py.
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
    max_wait_s: float | None = None
    tenants: Tenants = EQUALS
