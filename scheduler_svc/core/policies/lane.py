"""The requests of one tenant in one class: who waits, what was served, since when nobody came through."""

import heapq
from collections.abc import Callable

from scheduler_svc.core.account import Account
from scheduler_svc.core.policies.sequence_heap import SequenceHeap
from scheduler_svc.core.request import ServiceClass
from scheduler_svc.core.sequence import Sequence


class Lane:
    """See the module's first line.

    Attributes:
        number: in order of first arrival; the same for the same inputs.
        weight: of the tenant.
        account: what its running sequences use.
        waiting: never admitted, by priority, then by when their first token should be there.
        num_tokens: prompt tokens of those.
        service: virtual tokens it was served, divided by the weight; never falls.
        since_s: the time of the last admission from here, or of the first arrival after nobody was left.
    """

    def __init__(self, number: int, tenant: str, service_class: ServiceClass, weight: float):
        self.number = number
        self.tenant = tenant
        self.service_class = service_class
        self.weight = weight
        self.account = Account()
        self.waiting = SequenceHeap()
        self.num_tokens = 0
        self.service = 0.0
        self.since_s = 0.0
        self._num_decodes = 0

    @property
    def head(self) -> Sequence:
        """Who waits first; somebody waits."""
        found = self.waiting.first()
        assert found is not None, f"nobody waits in lane {self.number}"
        return found[1]

    def charge(self, tokens: float) -> None:
        """It was served so many virtual tokens."""
        self.service += tokens / self.weight

    def take_decodes(self) -> int:
        """Tokens that were decoded for it since the last call."""
        num_decodes = self.account.num_decodes - self._num_decodes
        self._num_decodes = self.account.num_decodes
        return num_decodes


class LaneHeap:
    """Lanes in which somebody waits, by a figure that never falls: it is looked up again when a lane comes to the top.

    Args:
        figure: of a lane, now.
    """

    def __init__(self, figure: Callable[[Lane], float]):
        self._figure = figure
        self._entries: list[tuple[float, int, Lane]] = []
        self._numbers: set[int] = set()

    def add(self, lane: Lane) -> None:
        """Somebody waits there. A lane that is in is fine."""
        if lane.number not in self._numbers:
            self._numbers.add(lane.number)
            heapq.heappush(self._entries, (self._figure(lane), lane.number, lane))

    def first(self) -> Lane | None:
        """The lane with the least figure; None: nobody waits in any."""
        entries = self._entries
        while entries:
            figure, number, lane = entries[0]
            if not lane.waiting:
                heapq.heappop(entries)
                self._numbers.discard(number)
            elif figure < (now := self._figure(lane)):
                heapq.heapreplace(entries, (now, number, lane))
            else:
                return lane
        return None
