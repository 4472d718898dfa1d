"""Copies between the device pool and the block store, on a thread of their own beside the step loop.

Knows blocks and the store's client. Does not know sequences or plans, nor how bytes travel. All copies release the GIL, and the
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
from common.patience import Patience
from common.shm.attachment import SlabUser
from executor_svc.clients.kvstore_report import OUT_OF_TIME, LoadReport, TierReading
from executor_svc.core.host_block import BlockSink, BlockSource

log = logging.getLogger(__name__)
_LOOK_AFTER_S = 0.5
_SAVED_AT_ONCE = 32
"""A load waits for so many blocks of a save; fewer would be mostly calls to the store."""


class SaveReport(Protocol):
    """What became of a save."""

    num_written: int
    num_present: int
    num_failed: int
    reason: str


class BlockStore(Protocol):
    """The block store as seen from here. Never raises: a failing store is a miss with a reason.

    It lends host memory, its own where it can; sinks and sources (executor_svc/core/host_block.py) copy.
    """

    @property
    def transport(self) -> tuple[str, str]:
        """How blocks travel ("shm", "inline" or "none"), and why not by shared memory. May change with every transfer."""
        ...

    def save(self, keys: Sequence[BlockKey], source: BlockSource) -> SaveReport:
        """Stores the bytes that source has for each key."""
        ...

    def load(self, keys: Sequence[BlockKey], sink: BlockSink, patience: Patience) -> LoadReport:
        """Fills sink with the block of each key, a chain that stops at the first miss."""
        ...

    def look_after(self) -> None:
        """Called now and then while nothing travels: the next transfer should find everything ready."""
        ...


class BlockMemory(SlabUser, Protocol):
    """The pool's blocks, and how their bytes travel from and to host memory. As a SlabUser it knows the store's memory.

    Attributes:
        num_blocks: of the pool.
        block_bytes: of a block below the device.
    """

    num_blocks: int
    block_bytes: int

    def mark(self) -> object:
        """A point in the device's work: all steps submitted so far. Called on the thread that submits steps."""
        ...

    def source(self, block_ids: Sequence[BlockId], after: object) -> BlockSource:
        """The blocks as they are after a mark, to be stored."""
        ...

    def sink(self, block_ids: Sequence[BlockId], after: object) -> BlockSink:
        """The blocks after a mark, to be filled."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """Fill device blocks from the store."""

    load_id: int
    blocks: Sequence[tuple[BlockKey, BlockId]]
    patience: Patience


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
    readings: Sequence[TierReading] = ()


@dataclass(frozen=True, slots=True)
class SaveDone:
    """The end of a save, see octavo.executor.v1.BlocksSaved."""

    save_id: int
    num_written: int = 0
    num_present: int = 0
    num_failed: int = 0
    reason: str = ""


_Queued = tuple[int, int, int, Load | Save | None, float, object]
"""Priority, number, session, transfer (None: the thread ends), when it was submitted, the device's mark at that time."""
_END: _Queued = (-1, 0, 0, None, 0.0, None)


@dataclass(frozen=True, slots=True)
class Drained:
    """What became of the blocks that waited to be saved when the executor was told to end.

    Attributes:
        num_saved: that the store has now.
        num_dropped: the others; they are computed again when they are needed.
    """

    num_saved: int
    num_dropped: int


class TransferThread:
    """Carries out loads and saves one by one, loads first: a request waits for a load, nobody for a save.

    A save that runs lets loads pass after every few blocks.

    Attributes:
        is_draining: the end has begun.
    """

    def __init__(self, memory: BlockMemory, store: BlockStore | None, report: Callable[[int, LoadDone | SaveDone], None]):
        """Starts the thread.

        Args:
            memory: whose blocks are read and written.
            store: None: every load is a miss and every save fails, with that reason.
            report: called on the transfer thread with the session and the outcome.
        """
        self._memory = memory
        self._store = store
        self._report = report
        self._queue: queue.PriorityQueue[_Queued] = queue.PriorityQueue()
        self._num_submitted = 0
        self._session = 0
        self._idle = threading.Condition()
        self._busy = False
        self.is_draining = False
        self._num_unsaved = 0
        """Blocks of the session's saves that are not through."""
        self._num_saved = 0
        self._thread = threading.Thread(target=self._run, name="transfers", daemon=True)
        self._thread.start()

    def submit(self, session: int, transfer: Load | Save) -> None:
        """Queues a transfer of the current session."""
        self._num_submitted += 1
        priority = 0 if isinstance(transfer, Load) else 1
        if isinstance(transfer, Save):
            with self._idle:
                self._num_unsaved += len(transfer.blocks)
        self._queue.put((priority, self._num_submitted, session, transfer, time.monotonic(), self._memory.mark()))

    def start_session(self, session: int) -> None:
        """Forgets what is queued of older sessions and waits for the transfer that runs.

        No copy of an older session touches a block of the new one after that.
        """
        with self._idle:
            self._session = session
            self._idle.wait_for(lambda: not self._busy)
            self._num_unsaved = 0

    def drain(self, timeout_s: float) -> Drained:
        """Ends the thread after the saves that wait, or after so long: then with the group of blocks that is under way."""
        with self._idle:
            self.is_draining = True
            num_waiting, num_saved_before = self._num_unsaved, self._num_saved
            self._idle.wait_for(lambda: self._num_unsaved == 0, timeout_s)
            self._session = -1
            num_saved = self._num_saved - num_saved_before
        self._queue.put(_END)
        return Drained(num_saved, num_waiting - num_saved)

    def stop(self) -> None:
        """Ends the thread after the transfer that runs."""
        self.start_session(-1)
        self._queue.put(_END)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                _, _, session, transfer, submitted_s, after = self._queue.get(timeout=_LOOK_AFTER_S)
            except queue.Empty:
                if self._store is not None:
                    self._store.look_after()
                continue
            if transfer is None:
                return
            with self._idle:
                if session != self._session:
                    continue
                self._busy = True
            try:
                self._tell(session, self._carry_out(session, transfer, submitted_s, after))
            finally:
                with self._idle:
                    self._busy = False
                    self._idle.notify_all()

    def _let_loads_pass(self, session: int) -> None:
        """Carries out the loads that came during a save."""
        while True:
            try:
                queued = self._queue.get_nowait()
            except queue.Empty:
                return
            _, _, of_session, transfer, submitted_s, after = queued
            if not isinstance(transfer, Load) or of_session != session:
                self._queue.put(queued)
                return
            self._tell(session, self._carry_out(session, transfer, submitted_s, after))

    def _tell(self, session: int, done: LoadDone | SaveDone) -> None:
        try:
            self._report(session, done)
        except ConnectionError:  # the front closes its pipe when it wants an end, and what waits is saved all the same
            log.debug("the front is gone and does not hear of %s", done)

    def _carry_out(self, session: int, transfer: Load | Save, submitted_s: float, after: object) -> LoadDone | SaveDone:
        if self.is_draining and isinstance(transfer, Load):
            return LoadDone(transfer.load_id, reason="the executor is about to stop")
        outside = [block_id for _, block_id in transfer.blocks if not 0 <= block_id < self._memory.num_blocks]
        if self._store is None or outside:
            reason = f"block ids outside the pool: {outside[:8]}" if outside else "this executor has no block store"
            if isinstance(transfer, Load):
                return LoadDone(transfer.load_id, reason=reason)
            self._note_through(len(transfer.blocks), 0)
            return SaveDone(transfer.save_id, num_failed=len(transfer.blocks), reason=reason)
        try:
            if isinstance(transfer, Save):
                return self._save(self._store, session, transfer, after)
            return self._load(self._store, transfer, submitted_s, after)
        except Exception as error:  # a bug of the client, which promises not to raise: somebody waits for the answer
            log.exception("the block store's client failed")
            if isinstance(transfer, Save):
                return SaveDone(transfer.save_id, num_failed=len(transfer.blocks), reason=repr(error))
            return LoadDone(transfer.load_id, reason=repr(error))

    def _save(self, store: BlockStore, session: int, save: Save, after: object) -> SaveDone:
        num_written = num_present = num_failed = 0
        reason = ""
        left = list(save.blocks)
        try:
            while left:
                if self._session != session:  # the time to drain is over
                    return SaveDone(save.save_id, num_written, num_present, num_failed + len(left), OUT_OF_TIME)
                self._let_loads_pass(session)
                keys, block_ids = _divided(left[:_SAVED_AT_ONCE])
                saved = store.save(keys, self._memory.source(block_ids, after))
                del left[:_SAVED_AT_ONCE]
                self._note_through(len(keys), saved.num_written + saved.num_present)
                num_written += saved.num_written
                num_present += saved.num_present
                num_failed += saved.num_failed
                reason = reason or saved.reason
        finally:
            self._note_through(len(left), 0)
        return SaveDone(save.save_id, num_written, num_present, num_failed, reason)

    def _note_through(self, num_blocks: int, num_saved: int) -> None:
        with self._idle:
            self._num_unsaved -= num_blocks
            self._num_saved += num_saved

    def _load(self, store: BlockStore, load: Load, submitted_s: float, after: object) -> LoadDone:
        left = load.patience.after(time.monotonic() - submitted_s, 0)
        if left.first_s <= 0:
            report = LoadReport(reason=OUT_OF_TIME)
        else:
            keys, block_ids = _divided(load.blocks)
            report = store.load(keys, self._memory.sink(block_ids, after), left)
        seconds = time.monotonic() - submitted_s
        return LoadDone(load.load_id, report.num_loaded, report.num_by_tier, report.reason, seconds, tuple(report.readings))


def _divided(blocks: Sequence[tuple[BlockKey, BlockId]]) -> tuple[list[BlockKey], list[BlockId]]:
    return [key for key, _ in blocks], [block_id for _, block_id in blocks]
