"""Sequences that wait for a place in the batch, in order of arrival, and the bounds on requests that were never admitted.

A preempted sequence comes back to the place that its arrival gives it, which is ahead of everything that was never admitted
after it. It does not count against the bounds: it was let in once.
"""

import bisect
from collections.abc import Iterator

from common.errors import QueueFull
from scheduler_svc.core.sequence import Sequence

RETRY_AFTER_S = 1.0
"""A queue of hundreds moves within seconds; the edge knows no better."""


class WaitingQueue:
    """See the module's first lines.

    Args:
        max_requests, max_tokens: bounds on queued requests and their prompt tokens.
    """

    def __init__(self, max_requests: int, max_tokens: int):
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Oldest first; the queue may change meanwhile."""
        return iter(list(self._sequences))

    def check_room(self, num_prompt_tokens: int) -> None:
        """Whether a request may come in. An empty queue takes any one.

        Raises:
            QueueFull: it would exceed a bound.
        """
        if self.num_requests >= self.max_requests:
            raise QueueFull(
                f"{self.num_requests} requests are waiting, the limit is {self.max_requests}",
                metadata={"maxWaitingRequests": str(self.max_requests)},
                retry_after_s=RETRY_AFTER_S,
            )
        if self.num_requests and self.num_tokens + num_prompt_tokens > self.max_tokens:
            raise QueueFull(
                f"{self.num_tokens} prompt tokens are waiting, with this request's {num_prompt_tokens} it would be more than the "
                f"limit of {self.max_tokens}",
                metadata={"maxWaitingTokens": str(self.max_tokens)},
                retry_after_s=RETRY_AFTER_S,
            )

    def count_in(self, num_prompt_tokens: int) -> None:
        """A request is queued."""
        self.num_requests += 1
        self.num_tokens += num_prompt_tokens

    def count_out(self, num_prompt_tokens: int) -> None:
        """A queued request was admitted for the first time, or ended before."""
        self.num_requests -= 1
        self.num_tokens -= num_prompt_tokens

    def insert(self, sequence: Sequence) -> None:
        """Puts a sequence in its place."""
        bisect.insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that is in the queue."""
        position = bisect.bisect_left(self._sequences, sequence.order, key=_order)
        assert self._sequences[position] is sequence, f"sequence {sequence.seq_id} is not in the queue"
        del self._sequences[position]


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
