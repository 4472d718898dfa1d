"""Which executor a request goes to: where the longest part of its prompt is, unless that one is busier than the part is worth.

Pure choice over figures of now. Does not know executors, keys or the store.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import NoExecutor
from common.ids import ExecutorId


@dataclass(frozen=True, slots=True)
class Candidate:
    """An executor that serves the request's model.

    Attributes:
        num_device_tokens: tokens of the prompt that it has on its device.
        num_waiting_tokens: prompt tokens in its queue.
        num_running_sequences: sequences in its batch.
        num_free_blocks: blocks without a reference.
    """

    executor_id: ExecutorId
    num_device_tokens: int
    num_waiting_tokens: int
    num_running_sequences: int
    num_free_blocks: int = 0


def choose_executor(candidates: Sequence[Candidate]) -> ExecutorId:
    """Picks the executor that has to compute least before it gets to the request's first token.

    That is the prompt tokens queued there less the prompt tokens that it need not compute. Among equals: fewer running
    sequences, then more free blocks, then the lower id, so that the same figures always give the same choice.

    Raises:
        NoExecutor: there is no candidate.
    """
    if not candidates:
        raise NoExecutor("no executor is connected", retry_after_s=1.0)
    return min(candidates, key=_cost).executor_id


def _cost(candidate: Candidate) -> tuple[int, int, int, str]:
    return (
        candidate.num_waiting_tokens - candidate.num_device_tokens,
        candidate.num_running_sequences,
        -candidate.num_free_blocks,
        candidate.executor_id,
    )
