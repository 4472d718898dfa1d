"""The store's shared memory as the GPU sees it: which of its bytes are registered. Knows slabs; no block, no copy.

A thread registers one piece after the other, because a slab takes the system tens of milliseconds and all of them seconds; the
pauses in between are for whoever wants the driver meanwhile, a step for example. What is not registered (yet) is no error: its
bytes take the way through staging buffers.
"""

import bisect
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from common.degraded import DegradedPaths
from common.shm.slab import Slab
from executor_svc.cuda.registrar import Registrar

log = logging.getLogger(__name__)
PIECE_BYTES = 64 << 20
_PAUSE_S = 0.002
UNPINNED = "kvstore_unpinned"


def address_of(data: memoryview) -> int:
    """Of its first byte."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


class PinnedSlab:
    """A slab's data and how much of it is registered.

    Attributes:
        slab: mapped as long as this refers to it.
        start: address of its first byte.
        memory: uint8 [bytes of the slab's data], the same memory.
        pinned_bytes: of the beginning of it, in pieces of piece_bytes, the last one shorter.
        num_users: copies that may be under way.
        is_going: nobody may begin to use it.
    """

    def __init__(self, slab: Slab):
        self.slab = slab
        self.start = address_of(slab.data)
        self.memory: Tensor = torch.frombuffer(slab.data, dtype=torch.uint8)
        self.pinned_bytes = 0
        self.num_users = 0
        self.is_going = False

    def has_pinned(self, address: int, num_bytes: int) -> bool:
        """Whether all of these bytes are registered."""
        return self.start <= address and address + num_bytes <= self.start + self.pinned_bytes

    def bytes_at(self, address: int, num_bytes: int) -> Tensor:
        """Uint8 [num_bytes] of it."""
        return self.memory[address - self.start : address - self.start + num_bytes]


class PinnedSlabs:
    """A SlabUser (common/shm/attachment.py). A slab that was let go of stays mapped until it is unregistered."""

    def __init__(self, registrar: Registrar, degraded: DegradedPaths, piece_bytes: int = PIECE_BYTES):
        """Starts nothing yet.

        Args:
            registrar: of the GPU.
            degraded: counts kvstore_unpinned.
            piece_bytes: registered at a time, a multiple of the page size; no copy may cross from one piece to the next.
        """
        self.piece_bytes = piece_bytes
        self._registrar = registrar
        self._degraded = degraded
        self._slabs: list[PinnedSlab] = []  # by address
        self._changed = threading.Condition()
        self._tasks: queue.SimpleQueue[PinnedSlab | None] = queue.SimpleQueue()
        self._num_tasks = 0
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Lets go of all slabs and ends the thread; nothing is copied any more."""
        self.slabs_unmapped([slab.slab for slab in self._slabs])
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    @property
    def num_pinned_bytes(self) -> int:
        """Of all slabs that are in use."""
        with self._changed:
            return sum(slab.pinned_bytes for slab in self._slabs)

    def slabs_mapped(self, slabs: Sequence[Slab]) -> None:
        """See SlabUser."""
        with self._changed:
            added = [PinnedSlab(slab) for slab in slabs]
            self._slabs = sorted([*self._slabs, *added], key=_start_of)
            self._num_tasks += len(added)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pin slabs", daemon=True)
                self._thread.start()
        for slab in added:
            self._tasks.put(slab)

    def slabs_unmapped(self, slabs: Sequence[Slab]) -> None:
        """See SlabUser."""
        gone = {id(slab) for slab in slabs}
        with self._changed:
            going = [slab for slab in self._slabs if id(slab.slab) in gone]
            self._slabs = [slab for slab in self._slabs if id(slab.slab) not in gone]
            self._num_tasks += len(going)
            for slab in going:
                slab.is_going = True
        for slab in going:
            self._tasks.put(slab)

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether everything that can be registered or unregistered is by then; returns as soon as it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_tasks == 0, timeout_s)

    @contextmanager
    def using(self, addresses: Sequence[int], num_bytes: int) -> Iterator[list[PinnedSlab | None]]:
        """Finds the slabs of some memory, which stays registered within the with block.

        Args:
            addresses: of the places in question.
            num_bytes: of each.

        Yields:
            The slab of each; None: the memory is not registered, or not all of it.
        """
        with self._changed:
            found = [self._slab_of(address, num_bytes) for address in addresses]
            used = {id(slab): slab for slab in found if slab is not None}.values()
            for slab in used:
                slab.num_users += 1
        try:
            yield found
        finally:
            with self._changed:
                for slab in used:
                    slab.num_users -= 1
                self._changed.notify_all()

    def check_integrity(self) -> None:
        """Raises AssertionError when counts are wrong; for moments without copies."""
        with self._changed:
            for slab in self._slabs:
                assert slab.num_users == 0, "a copy did not say that it ended"
                assert not slab.is_going
                assert 0 <= slab.pinned_bytes <= slab.memory.numel()

    def _slab_of(self, address: int, num_bytes: int) -> PinnedSlab | None:
        position = bisect.bisect_right(self._slabs, address, key=_start_of) - 1
        found = self._slabs[position] if position >= 0 else None
        return found if found is not None and found.has_pinned(address, num_bytes) else None

    def _run(self) -> None:
        """The thread: each slab comes twice, when it is mapped and when it is to be let go of."""
        while (slab := self._tasks.get()) is not None:
            if slab.is_going:
                self._unpin(slab)
            else:
                self._pin(slab)
            del slab  # or its memory would stay until the next one comes
            with self._changed:
                self._num_tasks -= 1
                self._changed.notify_all()

    def _pin(self, slab: PinnedSlab) -> None:
        started_s = time.monotonic()
        total = slab.memory.numel()
        while slab.pinned_bytes < total and not slab.is_going:
            num_bytes = min(self.piece_bytes, total - slab.pinned_bytes)
            try:
                self._registrar.register(slab.start + slab.pinned_bytes, num_bytes)
            except Exception as error:  # whatever it is, blocks travel without it
                self._degraded.note("kvstore_unpinned", f"slab {slab.slab.header.slab_id} from byte {slab.pinned_bytes}: {error}")
                return
            with self._changed:
                slab.pinned_bytes += num_bytes
                self._changed.notify_all()
            time.sleep(_PAUSE_S)
        if slab.pinned_bytes == total:
            log.debug("slab %d: %d MiB pinned, %.2f s", slab.slab.header.slab_id, total >> 20, time.monotonic() - started_s)

    def _unpin(self, slab: PinnedSlab) -> None:
        with self._changed:
            self._changed.wait_for(lambda: slab.num_users == 0)
            pinned_bytes, slab.pinned_bytes = slab.pinned_bytes, 0
        for offset in range(0, pinned_bytes, self.piece_bytes):
            try:
                self._registrar.unregister(slab.start + offset)
            except Exception as error:  # the device has failed, and the worker with it
                log.warning("slab %d cannot be unregistered: %s", slab.slab.header.slab_id, error)


def _start_of(slab: PinnedSlab) -> int:
    return slab.start
