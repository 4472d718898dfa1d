"""Requests by the times at which they end for lack of time. Looking for those that are due costs nothing while none is."""

import heapq

from common.ids import RequestId
from scheduler_svc.core.request import FinishReason, Request


class Deadlines:
    """See the module's first line. Requests that ended earlier stay in until their time; whoever asks knows them no more."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestId, FinishReason]] = []
        self._num_added = 0

    def add(self, request: Request) -> None:
        """A request came: its latest admission and its latest end."""
        for due_s, reason in (
            (request.queue_deadline_s, FinishReason.QUEUE_TIMEOUT),
            (request.deadline_s, FinishReason.DEADLINE),
        ):
            if due_s is not None:
                self._num_added += 1
                heapq.heappush(self._heap, (due_s, self._num_added, request.request_id, reason))

    def take_due(self, now_s: float) -> list[tuple[RequestId, FinishReason]]:
        """Those whose time has passed, in order."""
        due = []
        while self._heap and self._heap[0][0] < now_s:
            _, _, request_id, reason = heapq.heappop(self._heap)
            due.append((request_id, reason))
        return due
