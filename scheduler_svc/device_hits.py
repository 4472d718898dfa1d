"""Tells the block store which blocks are in use on a device, which it cannot see: that makes them worth keeping on disk.

Knows chains of keys. Never in the path of a request: what cannot be told now is told later, or not at all.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence

from common.ids import BlockKey
from scheduler_svc.clients.block_store import BlockStore

_MAX_TOLD = 1 << 18
_MAX_WAITING = 64


class DeviceHits:
    """Of one executor.

    Args:
        store: who is told; each key once, because a second use is all that it wants to know of.
    """

    def __init__(self, store: BlockStore):
        self._store = store
        self._told: OrderedDict[BlockKey, None] = OrderedDict()
        self._waiting: deque[list[BlockKey]] = deque(maxlen=_MAX_WAITING)
        self._telling: asyncio.Task[None] | None = None

    def note(self, keys: Sequence[BlockKey]) -> None:
        """A request found these blocks of a chain on the device."""
        fresh = [key for key in keys if key not in self._told]
        if not fresh:
            return
        self._told.update(dict.fromkeys(fresh))
        while len(self._told) > _MAX_TOLD:
            self._told.popitem(last=False)
        self._waiting.append(fresh)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell())

    async def settle(self) -> None:
        """Waits until nothing is to be told."""
        if self._telling is not None:
            await self._telling

    async def _tell(self) -> None:
        while self._waiting:
            await self._store.note_use(self._waiting.popleft())
