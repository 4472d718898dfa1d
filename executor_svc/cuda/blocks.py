"""Blocks between the GPU's pool and host memory, beside the steps. Knows copies and when they have ended; no store, no lease.

Memory that is registered (pinned_slabs.py) is read and written by the GPU itself, neighbouring blocks in one copy, while a few
threads compute checksums over the same memory. Anything else is copied into pinned buffers first, by the same threads.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from common.ids import BlockId
from common.shm.checksum import checksum
from common.shm.slab import Slab
from executor_svc.core.copy_runs import copy_runs, cut
from executor_svc.core.host_block import HostBlock
from executor_svc.cuda.pinned_slabs import PinnedSlab, PinnedSlabs, address_of
from executor_svc.cuda.staging import BUFFER_BYTES, StagingBuffers
from executor_svc.cuda.stream import CopyStream, DeviceStream, Mark
from executor_svc.kvcache.host_buffers import copy_bytes

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
_UNDER_WAY = 3
"""Parts behind which a load is full: the GPU always has the next one, and a load that is out of time ends soon."""


_SAVED_AT_ONCE = 8
"""Blocks of a save that are copied, then hashed while the next are copied."""


class DeviceBlocks(Protocol):
    """Blocks in the device's memory: a pool, or slots of one (stored_blocks.py).

    Attributes:
        num_blocks: how many.
        block_bytes: of each.
        num_bytes: of all.
        blocks: uint8 [num_blocks, block_bytes].
    """

    num_blocks: int
    block_bytes: int
    num_bytes: int
    blocks: Tensor


class _Pinned(Protocol):
    """Host memory that the GPU reaches."""

    start: int

    def bytes_at(self, address: int, num_bytes: int) -> Tensor:
        """Uint8 [num_bytes]."""
        ...


@dataclass(frozen=True, slots=True)
class _Part(Generic[ResultT]):
    """Consecutive blocks of a transfer under way."""

    mark: Mark
    results: Sequence["Future[list[ResultT]]"]

    def wait(self) -> list[ResultT]:
        """One result per block, in order, once copies and checksums have ended."""
        self.mark.wait()
        return _gathered(self.results)


class CudaBlocks:
    """The BlockMemory (executor_svc/transfer.py) of a GPU. All but mark and the news of slabs belongs to the transfer thread."""

    def __init__(
        self,
        pool: DeviceBlocks,
        steps: DeviceStream,
        copies: CopyStream,
        slabs: PinnedSlabs,
        *,
        num_threads: int,
        buffer_bytes: int = BUFFER_BYTES,
    ):
        """Takes the staging memory.

        Args:
            pool: whose blocks travel.
            steps: the stream that steps run on.
            copies: a stream of our own.
            slabs: which memory is registered.
            num_threads: that compute checksums.
            buffer_bytes: of each of the two buffers, and most bytes of a group of blocks; a block fits in any case.
        """
        self.num_blocks = pool.num_blocks
        self.block_bytes = pool.block_bytes
        self._steps = steps
        self._copies = copies
        self._slabs = slabs
        self._pool_bytes = pool.blocks.view(-1)
        self._staging = StagingBuffers(copies, pool.block_bytes, min(buffer_bytes, pool.num_bytes))
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="checksums")

    def slabs_mapped(self, slabs: Sequence[Slab]) -> None:
        """See SlabUser."""
        self._slabs.slabs_mapped(slabs)

    def slabs_unmapped(self, slabs: Sequence[Slab]) -> None:
        """See SlabUser."""
        self._slabs.slabs_unmapped(slabs)

    def mark(self) -> Mark:
        """See BlockMemory."""
        return self._steps.mark()

    def sink(self, block_ids: Sequence[BlockId], after: object) -> "_Sink":
        """See BlockMemory."""
        return _Sink(self, block_ids, after)

    def source(self, block_ids: Sequence[BlockId], after: object) -> "_Source":
        """See BlockMemory."""
        return _Source(self, block_ids, after)

    def close(self) -> None:
        """Lets go of all slabs and ends the threads."""
        self._threads.shutdown()
        self._slabs.close()

    def _start(
        self, block_ids: Sequence[BlockId], blocks: Sequence[HostBlock], addresses: Sequence[int], slabs: Sequence[PinnedSlab]
    ) -> _Part[bool]:
        """The GPU reads the slabs, and so do the threads."""
        self._copy(block_ids, addresses, slabs, self._copies.upload)
        return _Part(self._copies.mark(), self._by_threads(_is_right, blocks))

    def _start_staged(self, block_ids: Sequence[BlockId], blocks: Sequence[HostBlock]) -> _Part[bool]:
        """The threads copy into a buffer and look at what they copied; the GPU reads the buffer."""
        buffer = self._staging.turn()
        rows = [buffer.view(row) for row in range(len(blocks))]

        def stage(row: int) -> bool:
            copy_bytes(rows[row], blocks[row].data)
            return checksum(rows[row]) == blocks[row].checksum

        results = self._by_threads(stage, range(len(blocks)))
        wait(results)
        self._copy(block_ids, [address_of(row) for row in rows], [buffer] * len(rows), self._copies.upload)
        buffer.mark = self._copies.mark()
        return _Part(buffer.mark, results)

    def _write(self, block_ids: Sequence[BlockId], after: object, places: Sequence[HostBlock]) -> list[bytes]:
        """See BlockSource."""
        sums: list[bytes] = []
        self._copies.wait_for(after)
        with self._slabs.using(places_at := [address_of(place.data) for place in places], self.block_bytes) as slabs:
            try:
                for part, pinned in _parts(slabs, self._staging.num_blocks):
                    some = places[part]
                    ids = [block_ids[place.index] for place in some]
                    if pinned:
                        sums += self._write_direct(ids, some, places_at[part], pinned)
                    else:
                        sums += self._write_staged(ids, some)
            finally:
                self._copies.check()
        return sums

    def _write_direct(
        self, block_ids: Sequence[BlockId], places: Sequence[HostBlock], addresses: Sequence[int], slabs: Sequence[PinnedSlab]
    ) -> list[bytes]:
        pieces = [slice(start, start + _SAVED_AT_ONCE) for start in range(0, len(places), _SAVED_AT_ONCE)]
        marks = []
        for piece in pieces:
            self._copy(block_ids[piece], addresses[piece], slabs[piece], self._copies.download_to)
            marks.append(self._copies.mark())
        results: list[Future[list[bytes]]] = []
        for piece, mark in zip(pieces, marks, strict=True):
            mark.wait()
            results += self._by_threads(_checksum_of, places[piece])
        return _gathered(results)

    def _write_staged(self, block_ids: Sequence[BlockId], places: Sequence[HostBlock]) -> list[bytes]:
        buffer = self._staging.turn()
        rows = [buffer.view(row) for row in range(len(places))]
        self._copy(block_ids, [address_of(row) for row in rows], [buffer] * len(rows), self._copies.download_to)
        self._copies.mark().wait()

        def unload(row: int) -> bytes:
            copy_bytes(places[row].data, rows[row])
            return checksum(rows[row])

        return _gathered(self._by_threads(unload, range(len(places))))

    def _copy(
        self,
        block_ids: Sequence[BlockId],
        addresses: Sequence[int],
        memories: Sequence[_Pinned],
        copy: Callable[[Tensor, Tensor], None],
    ) -> None:
        """Queues copies; none crosses a boundary between two registrations, where CUDA refuses it."""
        with self._copies.use(), torch.inference_mode():
            for start, end in _stretches(memories):
                memory = memories[start]
                for run in copy_runs(block_ids[start:end], addresses[start:end], self.block_bytes):
                    for piece in cut(run, memory.start, self._slabs.piece_bytes):
                        device = self._pool_bytes[piece.pool_offset : piece.pool_offset + piece.num_bytes]
                        copy(memory.bytes_at(piece.address, piece.num_bytes), device)

    def _by_threads(self, work: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> "list[Future[list[ResultT]]]":
        """Each thread takes consecutive items; the results in order are those of the first, then those of the second..."""
        share = -(-len(items) // self._num_threads)
        return [
            self._threads.submit(lambda some: [work(item) for item in some], items[start : start + share])
            for start in range(0, len(items), share)
        ]


@dataclass(frozen=True, slots=True)
class _Sink:
    """See BlockSink."""

    memory: CudaBlocks
    block_ids: Sequence[BlockId]
    after: object

    @property
    def block_bytes(self) -> int:
        """See BlockSink."""
        return self.memory.block_bytes

    def begin(self) -> "_Filling":
        """See BlockSink."""
        return _Filling(self.memory, self.block_ids, self.after)


class _Filling:
    """See Filling. Slabs stay registered until its end."""

    def __init__(self, memory: CudaBlocks, block_ids: Sequence[BlockId], after: object):
        self._memory = memory
        self._block_ids = block_ids
        self._parts: deque[_Part[bool]] = deque()
        self._held = ExitStack()
        memory._copies.wait_for(after)

    @property
    def is_under_way(self) -> bool:
        """See Filling."""
        return bool(self._parts)

    @property
    def is_full(self) -> bool:
        """See Filling."""
        return len(self._parts) > _UNDER_WAY

    def add(self, blocks: Sequence[HostBlock]) -> None:
        """See Filling."""
        memory, addresses = self._memory, [address_of(block.data) for block in blocks]
        slabs = self._held.enter_context(memory._slabs.using(addresses, memory.block_bytes))
        for part, pinned in _parts(slabs, memory._staging.num_blocks):
            some = blocks[part]
            ids = [self._block_ids[block.index] for block in some]
            if pinned:
                self._parts.append(memory._start(ids, some, addresses[part], pinned))
            else:
                self._parts.append(memory._start_staged(ids, some))

    def verdicts(self) -> list[bool]:
        """See Filling."""
        found = self._parts[0].wait()
        self._parts.popleft()
        return found

    def close(self) -> None:
        """See Filling."""
        try:
            self._memory._copies.check()  # broken off, or failed: the memory is not ours any more after this
        finally:
            for left in self._parts:
                wait(left.results)
            self._parts.clear()
            self._held.close()


@dataclass(frozen=True, slots=True)
class _Source:
    """See BlockSource."""

    memory: CudaBlocks
    block_ids: Sequence[BlockId]
    after: object

    @property
    def block_bytes(self) -> int:
        """See BlockSource."""
        return self.memory.block_bytes

    def write_to(self, places: Sequence[HostBlock]) -> list[bytes]:
        """See BlockSource."""
        return self.memory._write(self.block_ids, self.after, places)


def _parts(slabs: Sequence[PinnedSlab | None], most: int) -> Iterator[tuple[slice, list[PinnedSlab]]]:
    """Consecutive blocks, so many at most, that are all registered or all not: which ones, and the slab of each or no slabs."""
    start = 0
    for end in range(1, len(slabs) + 1):
        if end == len(slabs) or (slabs[end] is None) != (slabs[start] is None) or end - start == most:
            yield slice(start, end), [slab for slab in slabs[start:end] if slab is not None]
            start = end


def _stretches(memories: Sequence[object]) -> Iterator[tuple[int, int]]:
    """(start, end) of consecutive blocks in the same memory."""
    start = 0
    for end in range(1, len(memories) + 1):
        if end == len(memories) or memories[end] is not memories[start]:
            yield start, end
            start = end


def _checksum_of(block: HostBlock) -> bytes:
    return checksum(block.data)


def _is_right(block: HostBlock) -> bool:
    return checksum(block.data) == block.checksum


def _gathered(futures: Sequence["Future[list[ResultT]]"]) -> list[ResultT]:
    """All results in order, when the last thread has ended."""
    wait(futures)
    return [result for future in futures for result in future.result()]
