"""Which executor a request goes to: the one that is expected to be through with it first.

Pure choice over figures of now. Does not know executors, keys or the store.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import NoExecutor
from common.ids import ExecutorId

_ALIKE_S = 0.001
"""Expected times that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An executor that serves the request's model.

    Attributes:
        num_device_tokens: tokens of the prompt that it has on its device.
        num_waiting_tokens: prompt tokens in its queue.
        num_running_sequences: sequences in its batch.
        num_free_blocks: blocks without a reference.
        finish_s: seconds until it should be through with the request (forecast/wait.py); None: its steps are not known yet.
    """

    executor_id: ExecutorId
    num_device_tokens: int
    num_waiting_tokens: int
    num_running_sequences: int
    num_free_blocks: int = 0
    finish_s: float | None = None


def choose_executor(candidates: Sequence[Candidate]) -> ExecutorId:
    """Picks the executor that is expected to be through with the request first.

    What it waits for, what has to be computed of its prompt behind the part that the device has, and how long each of its tokens
    takes among those that run there: all of it is in finish_s. As long as that is not known of each executor, it is the one that
    has to compute least before it gets to the first token: the prompt tokens queued there less those of the prompt that it has.
    Among equals: fewer running sequences, then more free blocks, then the lower id, so that the same figures always give the
    same choice.

    Raises:
        NoExecutor: there is no candidate.
    """
    if not candidates:
        raise NoExecutor("no executor is connected", retry_after_s=1.0)
    if all(candidate.finish_s is not None for candidate in candidates):
        return min(candidates, key=_by_finish).executor_id
    return min(candidates, key=_by_tokens).executor_id


def _by_finish(candidate: Candidate) -> tuple[int, int, int, str]:
    return (round((candidate.finish_s or 0.0) / _ALIKE_S), *_order_of_equals(candidate))


def _by_tokens(candidate: Candidate) -> tuple[int, int, int, str]:
    return (candidate.num_waiting_tokens - candidate.num_device_tokens, *_order_of_equals(candidate))


def _order_of_equals(candidate: Candidate) -> tuple[int, int, str]:
    return candidate.num_running_sequences, -candidate.num_free_blocks, candidate.executor_id
