"""Waiting sequences in order of a key. Coming, going and looking cost O(log n), whoever it is."""

import heapq
from collections.abc import Iterator
from typing import Any

from common.ids import SeqId
from scheduler_svc.core.sequence import Sequence

_FEW = 64


class SequenceHeap:
    """See the module's first line. Keys are compared; one that leaves is struck out, and swept away when many are."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, Sequence]] = []
        self._numbers: dict[SeqId, int] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._numbers

    def __iter__(self) -> Iterator[Sequence]:
        """In any order."""
        return (sequence for _, number, sequence in self._entries if self._numbers.get(sequence.seq_id) == number)

    def push(self, key: Any, sequence: Sequence) -> None:
        """Puts in a sequence that is not in."""
        assert sequence.seq_id not in self._numbers, f"sequence {sequence.seq_id} waits already"
        self._num_pushed += 1
        self._numbers[sequence.seq_id] = self._num_pushed
        heapq.heappush(self._entries, (key, self._num_pushed, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that is in."""
        del self._numbers[sequence.seq_id]
        if len(self._entries) > 2 * len(self._numbers) + _FEW:
            self._entries = [entry for entry in self._entries if self._numbers.get(entry[2].seq_id) == entry[1]]
            heapq.heapify(self._entries)

    def first(self) -> tuple[Any, Sequence] | None:
        """The one with the least key, and its key; None: empty."""
        entries, numbers = self._entries, self._numbers
        while entries:
            key, number, sequence = entries[0]
            if numbers.get(sequence.seq_id) == number:
                return key, sequence
            heapq.heappop(entries)
        return None
