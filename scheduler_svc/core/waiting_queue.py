"""Sequences that wait for a place in the batch.

Who could run is with the policy, which knows the order. Who waits for something else (a load from the store, a prefix that others
compute) is set aside here and costs nothing until that is over: no step looks at more of the queue than it admits.
"""

from collections.abc import Iterable, Iterator

from common.ids import BlockKey, SeqId
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.prefix_index import PrefixIndex
from scheduler_svc.core.sequence import Sequence


class WaitingQueue:
    """See the module's first lines.

    Args:
        policy: the order.
    """

    def __init__(self, policy: Policy):
        self._policy = policy
        # Sequences that wait for something else, by what; and where each of them is. None: a load, or a sibling's prompt.
        self._held: dict[SeqId, Sequence] = {}
        self._siblings: dict[SeqId, Sequence] = {}
        self._awaiting: dict[BlockKey, dict[SeqId, Sequence]] = {}
        self._aside: dict[SeqId, dict[SeqId, Sequence]] = {}

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Sequence]:
        """All, in any order."""
        yield from self._policy
        yield from self._held.values()
        yield from self._siblings.values()
        for sequences in self._awaiting.values():
            yield from sequences.values()

    def insert(self, sequence: Sequence) -> None:
        """Puts a sequence in its place."""
        self._policy.insert(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that is in the queue."""
        if sequence.seq_id in self._aside:
            self._take_back(sequence)
        else:
            self._policy.remove(sequence)

    def hold(self, sequences: Iterable[Sequence]) -> None:
        """Blocks are loaded for sequences of the queue: they wait for that."""
        for sequence in sequences:
            self.remove(sequence)
            self._set_aside(sequence, self._held)

    def release(self, sequences: Iterable[Sequence]) -> None:
        """The load is over."""
        for sequence in sequences:
            self._take_back(sequence)
            self._policy.insert(sequence)

    def let_wait(self, sequence: Sequence, key: BlockKey | None) -> None:
        """The first waits for what others compute: a block, or a sibling's prompt (None)."""
        self._policy.remove(sequence)
        sequence.awaited_key = key
        self._set_aside(sequence, self._siblings if key is None else self._awaiting.setdefault(key, {}))

    def wake(self, index: PrefixIndex) -> None:
        """Who waited for what others compute is back when they are through."""
        if not self._awaiting and not self._siblings:
            return
        awake = list(self._siblings.values())
        for key, sequences in self._awaiting.items():
            if not index.is_promised(key):
                awake += sequences.values()
        self.release(awake)

    def is_aside(self, sequence: Sequence) -> bool:
        """Whether a sequence of the queue waits for something else."""
        return sequence.seq_id in self._aside

    def _set_aside(self, sequence: Sequence, place: dict[SeqId, Sequence]) -> None:
        place[sequence.seq_id] = sequence
        self._aside[sequence.seq_id] = place

    def _take_back(self, sequence: Sequence) -> None:
        place = self._aside.pop(sequence.seq_id)
        del place[sequence.seq_id]
        key, sequence.awaited_key = sequence.awaited_key, None
        if key is not None and not place and self._awaiting.get(key) is place:
            del self._awaiting[key]
