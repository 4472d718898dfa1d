"""The last changes of what the store has, numbered. Knows keys and tiers, not who reads them.

A ring: readers have a place in it each and hold up nobody. One who falls behind by more than the ring keeps is told so, and
begins again with all that is there.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from common.ids import BlockKey


class EventKind(enum.Enum):
    """What became of a block in a tier."""

    STORED = "readable from now on"
    REMOVED = "not there any more"


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One change."""

    kind: EventKind
    key: BlockKey
    tier: str


def _nobody_listens() -> None:
    pass


class EventLog:
    """See the module's first lines.

    Args:
        capacity: events that are kept; at least 1.

    Attributes:
        last_sequence: number of the newest event; events count from 1, 0: there is none yet.
        on_append: called after each event.
    """

    def __init__(self, capacity: int):
        self.last_sequence = 0
        self.on_append: Callable[[], None] = _nobody_listens
        self._capacity = capacity
        # Event number n is at n % capacity, once that many were appended.
        self._ring: list[BlockEvent] = []

    def append(self, kind: EventKind, key: BlockKey, tier: str) -> None:
        """The next event."""
        self.last_sequence += 1
        event = BlockEvent(kind, key, tier)
        if len(self._ring) < self._capacity:
            self._ring.append(event)
        else:
            self._ring[(self.last_sequence - 1) % self._capacity] = event
        self.on_append()

    def after(self, sequence: int, limit: int) -> list[BlockEvent] | None:
        """Events behind a number, oldest first.

        Args:
            sequence: of the last event that the reader knows.
            limit: at most so many.

        Returns:
            None: some of them are not kept any more, or the number was never given out.
        """
        if not self.last_sequence - len(self._ring) <= sequence <= self.last_sequence:
            return None
        end = min(sequence + limit, self.last_sequence)
        return [self._ring[number % self._capacity] for number in range(sequence, end)]
