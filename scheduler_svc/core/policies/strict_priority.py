"""The most urgent first, whatever that does to others: by class, then priority, then arrival.

Starves those who are not urgent while others come; fair_share.py does not.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from scheduler_svc.core.policies.sequence_heap import SequenceHeap
from scheduler_svc.core.preemption import choose_victim
from scheduler_svc.core.request import Request
from scheduler_svc.core.sequence import Sequence

_PRIORITIES_PER_CLASS = 1 << 20
"""More than there are."""


class StrictPriority:
    """See the module's first line, and Policy."""

    def __init__(self) -> None:
        self._waiting = SequenceHeap()
        self._num_tokens_by_tier: dict[int, int] = {}

    def begin_step(self, now_s: float) -> None:
        """See Policy."""

    def insert(self, sequence: Sequence) -> None:
        """See Policy."""
        sequence.tier = sequence.claim = _tier(sequence.request)
        self._waiting.push(sequence.rank, sequence)
        num_tokens = self._num_tokens_by_tier.get(sequence.tier, 0)
        self._num_tokens_by_tier[sequence.tier] = num_tokens + sequence.num_prompt_tokens

    def remove(self, sequence: Sequence) -> None:
        """See Policy."""
        self._waiting.remove(sequence)
        self._num_tokens_by_tier[sequence.tier] -= sequence.num_prompt_tokens

    def first(self) -> Sequence | None:
        """See Policy."""
        found = self._waiting.first()
        return None if found is None else found[1]

    def admit(self, sequence: Sequence, num_new_tokens: int, num_cached_tokens: int) -> None:
        """See Policy."""
        self.remove(sequence)

    def choose_victim(self, candidates: Seq[Sequence]) -> Sequence | None:
        """See Policy."""
        return choose_victim(candidates)

    def longest_step(self, sequence: Sequence) -> float | None:
        """See Policy."""
        return None

    def steps_aside(self, sequence: Sequence, prompt: Sequence) -> bool:
        """See Policy."""
        return False

    def num_tokens_ahead(self, request: Request) -> int:
        """See Policy."""
        own = _tier(request)
        return sum(num_tokens for tier, num_tokens in self._num_tokens_by_tier.items() if tier <= own)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)


def _tier(request: Request) -> int:
    return request.service_class * _PRIORITIES_PER_CLASS + request.priority
