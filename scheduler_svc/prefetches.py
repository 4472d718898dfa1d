"""Requests in the queue whose blocks lie in lower tiers: they are brought up into shared memory meanwhile.

Knows the store and who waits. Does not know the queue: whoever does asks for those whose turn it is. A prefetch ends with its
request, and few run at a time, so that blocks that nobody will use are bounded.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from common.ids import BlockKey, RequestId
from scheduler_svc.clients.block_store import BlockStore
from scheduler_svc.core.request import Request

_MAX_RUNNING = 4


@dataclass(frozen=True, slots=True)
class Found:
    """What a look-up found.

    Attributes:
        num_device_blocks: leading blocks of the prompt that were on the device.
        tiers: of the blocks behind them.
        asked_at_s: when the look-up began, or a wait in the queue ended.
    """

    num_device_blocks: int
    tiers: Sequence[str]
    asked_at_s: float


@dataclass(slots=True, eq=False)
class _Waiting:
    request: Request
    found: Found
    keys: Sequence[BlockKey]
    task: "asyncio.Task[None] | None" = None
    num_up: int = 0
    is_up: bool = False


class Prefetches:
    """Of one executor's queue.

    Args:
        store: where blocks are.
        fingerprint: of the executor's blocks.
        block_bytes: of each.
        on_ready: called when the blocks of a request are up.
    """

    def __init__(self, store: BlockStore, fingerprint: bytes, block_bytes: int, on_ready: Callable[[], None]):
        self._store = store
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._on_ready = on_ready
        self._waiting: dict[RequestId, _Waiting] = {}

    @property
    def is_running(self) -> bool:
        """Whether one is under way."""
        return any(one.task is not None and not one.task.done() for one in self._waiting.values())

    def begin(self, request: Request, found: Found, keys: Sequence[BlockKey]) -> None:
        """A request waits for its turn.

        Args:
            request: in the queue.
            found: what the store has for it.
            keys: of the blocks behind found.num_device_blocks.
        """
        if request.request_id not in self._waiting:
            self._waiting[request.request_id] = _Waiting(request, found, keys[: len(found.tiers)])
            self._start_some()

    def drop(self, request_id: RequestId) -> None:
        """A request has ended, or runs, or loads."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None and waiting.task is not None:
            waiting.task.cancel()
        self._start_some()

    def due(self, next_in_line: RequestId | None, now_s: float) -> list[tuple[Request, Found]]:
        """Requests, oldest first, for which to decide again: their blocks have just come up, or it is their turn."""
        due = []
        for one in self._waiting.values():
            if one.is_up or one.request.request_id == next_in_line:
                one.is_up = False
                found = replace(one.found, tiers=_with_shm(one.found.tiers, one.num_up), asked_at_s=now_s)
                due.append((one.request, found))
        return due

    def close(self) -> None:
        """Ends all."""
        for request_id in list(self._waiting):
            self.drop(request_id)

    def _start_some(self) -> None:
        num_running = sum(one.task is not None and not one.task.done() for one in self._waiting.values())
        for one in self._waiting.values():
            if num_running >= _MAX_RUNNING:
                return
            if one.task is None:
                one.task = asyncio.create_task(self._run(one))
                num_running += 1

    async def _run(self, waiting: _Waiting) -> None:
        async for _ in self._store.prefetch(waiting.keys, self._fingerprint, self._block_bytes):
            waiting.num_up += 1
        waiting.is_up = True
        asyncio.get_running_loop().call_soon(self._ended)

    def _ended(self) -> None:
        self._start_some()
        self._on_ready()


def _with_shm(tiers: Sequence[str], num_up: int) -> list[str]:
    return ["shm"] * min(num_up, len(tiers)) + list(tiers[num_up:])
