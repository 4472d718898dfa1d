"""Copies between the device pool and the block store, on a thread of their own beside the step loop.

Knows blocks and the store's client. Does not know sequences or plans. Both copies (memcpy, sockets) release the GIL, and the
thread sleeps while there is nothing to do, so steps are not slowed by waiting transfers.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.ids import BlockId, BlockKey
from executor_svc.kvcache.pool import KvPool

log = logging.getLogger(__name__)


class SaveReport(Protocol):
    """What became of a save."""

    num_written: int
    num_present: int
    num_failed: int
    reason: str


class LoadReport(Protocol):
    """What became of a load."""

    num_loaded: int
    num_by_tier: dict[str, int]
    reason: str
    seconds: float


class BlockStore(Protocol):
    """The block store as seen from here. Never raises: a failing store is a miss with a reason."""

    @property
    def transport(self) -> tuple[str, str]:
        """How blocks travel ("shm", "inline" or "none"), and why not by shared memory. May change with every transfer."""
        ...

    def save(self, blocks: Sequence[tuple[BlockKey, memoryview]]) -> SaveReport:
        """Stores the bytes of each block under its key."""
        ...

    def load(self, blocks: Sequence[tuple[BlockKey, memoryview]], timeout_s: float) -> LoadReport:
        """Fills each memory with the block of its key, a chain that stops at the first miss."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """Fill device blocks from the store."""

    load_id: int
    blocks: Sequence[tuple[BlockKey, BlockId]]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Save:
    """Write device blocks to the store."""

    save_id: int
    blocks: Sequence[tuple[BlockKey, BlockId]]


@dataclass(frozen=True, slots=True)
class LoadDone:
    """The end of a load, see octavo.executor.v1.BlocksLoaded."""

    load_id: int
    num_loaded: int = 0
    num_by_tier: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveDone:
    """The end of a save, see octavo.executor.v1.BlocksSaved."""

    save_id: int
    num_written: int = 0
    num_present: int = 0
    num_failed: int = 0
    reason: str = ""


class TransferThread:
    """Carries out loads and saves one by one, loads first: a request waits for a load, nobody for a save."""

    def __init__(self, pool: KvPool, store: BlockStore | None, report: Callable[[int, LoadDone | SaveDone], None]):
        """Starts the thread.

        Args:
            pool: whose blocks are read and written.
            store: None: every load is a miss and every save fails, with that reason.
            report: called on the transfer thread with the session and the outcome.
        """
        self._pool = pool
        self._store = store
        self._report = report
        self._queue: queue.PriorityQueue[tuple[int, int, int, Load | Save | None]] = queue.PriorityQueue()
        self._num_submitted = 0
        self._session = 0
        self._idle = threading.Condition()
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="transfers", daemon=True)
        self._thread.start()

    def submit(self, session: int, transfer: Load | Save) -> None:
        """Queues a transfer of the current session."""
        self._num_submitted += 1
        self._queue.put((0 if isinstance(transfer, Load) else 1, self._num_submitted, session, transfer))

    def start_session(self, session: int) -> None:
        """Forgets what is queued of older sessions and waits for the transfer that runs.

        No copy of an older session touches a block of the new one after that.
        """
        with self._idle:
            self._session = session
            self._idle.wait_for(lambda: not self._busy)

    def stop(self) -> None:
        """Ends the thread after the transfer that runs."""
        self.start_session(-1)
        self._queue.put((-1, 0, 0, None))
        self._thread.join()

    def _run(self) -> None:
        while True:
            _, _, session, transfer = self._queue.get()
            if transfer is None:
                return
            with self._idle:
                if session != self._session:
                    continue
                self._busy = True
            try:
                self._report(session, self._carry_out(transfer))
            except ConnectionError:
                log.info("the front is gone; transfers end")
                return
            finally:
                with self._idle:
                    self._busy = False
                    self._idle.notify_all()

    def _carry_out(self, transfer: Load | Save) -> LoadDone | SaveDone:
        outside = [block_id for _, block_id in transfer.blocks if not 0 <= block_id < self._pool.num_blocks]
        if self._store is None or outside:
            reason = f"block ids outside the pool: {outside[:8]}" if outside else "this executor has no block store"
            if isinstance(transfer, Load):
                return LoadDone(transfer.load_id, reason=reason)
            return SaveDone(transfer.save_id, num_failed=len(transfer.blocks), reason=reason)
        blocks = [(key, self._pool.block_view(block_id)) for key, block_id in transfer.blocks]
        started = time.monotonic()
        try:
            if isinstance(transfer, Save):
                saved = self._store.save(blocks)
                return SaveDone(transfer.save_id, saved.num_written, saved.num_present, saved.num_failed, saved.reason)
            loaded = self._store.load(blocks, transfer.timeout_s)
        except Exception as error:  # a bug of the client, which promises not to raise: somebody waits for the answer
            log.exception("the block store's client failed")
            if isinstance(transfer, Save):
                return SaveDone(transfer.save_id, num_failed=len(blocks), reason=repr(error))
            return LoadDone(transfer.load_id, reason=repr(error))
        seconds = time.monotonic() - started
        return LoadDone(transfer.load_id, loaded.num_loaded, dict(loaded.num_by_tier), loaded.reason, seconds)
