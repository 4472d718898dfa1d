"""Events of the store as a stream: first what is there, then what changes. Knows the log and who waits; not gRPC.

A reader who reads slowly holds up nobody: it finds its place in the log gone, and begins again.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from common.ids import Epoch
from kvstore_svc.core.block_store import TIER, BlockStore
from kvstore_svc.core.event_log import BlockEvent, EventKind

# About 200 KiB on the wire.
MAX_EVENTS_PER_BATCH = 4096
# Events come in bursts; a message for each would cost more than they are worth.
_GATHER_S = 0.005


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Some events.

    Attributes:
        sequence: of the last one; 0: reading cannot go on from here.
        is_resync: what was known before means nothing any more.
    """

    sequence: int
    is_resync: bool
    events: list[BlockEvent]


class EventFeed:
    """See the module's first lines."""

    def __init__(self, store: BlockStore):
        self._store = store
        self._log = store.events
        self._log.on_append = self._wake
        self._is_closed = False
        self._news: asyncio.Event | None = None

    def close(self) -> None:
        """Ends all streams."""
        self._is_closed = True
        self._wake()

    async def watch(self, epoch: Epoch, sequence: int) -> AsyncIterator[EventBatch]:
        """Batches, until close.

        Args:
            epoch: of the store whose events the reader knows.
            sequence: of the last of them; 0: none.
        """
        is_known = epoch == self._store.epoch and sequence > 0
        while not self._is_closed:
            events = self._log.after(sequence, MAX_EVENTS_PER_BATCH) if is_known else None
            if events is None:
                # From here on sequence is a number of this log: the stream of changes begins where the list was made.
                sequence, is_known = self._log.last_sequence, True
                for batch in self._all(sequence):
                    yield batch
            elif events:
                sequence += len(events)
                yield EventBatch(sequence, False, events)
            else:
                await self._until_news()

    def _all(self, sequence: int) -> list[EventBatch]:
        """What is there now, of which only the last batch can be gone on from."""
        events = [BlockEvent(EventKind.STORED, key, TIER) for key in self._store.committed_keys()]
        starts = range(0, max(1, len(events)), MAX_EVENTS_PER_BATCH)
        batches = [events[start : start + MAX_EVENTS_PER_BATCH] for start in starts]
        last = len(batches) - 1
        return [EventBatch(sequence if i == last else 0, i == 0, batch) for i, batch in enumerate(batches)]

    async def _until_news(self) -> None:
        if self._news is None:
            self._news = asyncio.Event()
        await self._news.wait()
        if not self._is_closed:
            await asyncio.sleep(_GATHER_S)

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None
