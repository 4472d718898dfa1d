"""Blocks between the GPU's pool and host memory, beside the steps. Knows copies and when they have ended; no store, no lease.

Memory that is registered (pinned_slabs.py) is read and written by the GPU itself, neighbouring blocks in one copy, while a few
threads compute checksums over the same memory. Anything else is copied into pinned buffers first, by the same threads.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
from executor_svc.kvcache.cuda_pool import CudaKvPool
from executor_svc.kvcache.host_buffers import copy_bytes

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
_UNDER_WAY = 3
"""Groups whose copies are queued at a time: the GPU always has the next one, and a load that is out of time ends soon."""


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
        pool: CudaKvPool,
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

    def _fill(self, block_ids: Sequence[BlockId], after: object, blocks: Sequence[HostBlock]) -> Generator[bool, None, None]:
        """See BlockSink."""
        under_way: deque[_Part[bool]] = deque()
        self._copies.wait_for(after)
        with self._slabs.using(blocks_at := [address_of(block.data) for block in blocks], self.block_bytes) as slabs:
            try:
                for part, slab in _parts(slabs, self._staging.num_blocks):
                    some = blocks[part]
                    ids = [block_ids[block.index] for block in some]
                    if slab is not None:
                        under_way.append(self._start(ids, some, blocks_at[part], slab))
                    else:
                        under_way.append(self._start_staged(ids, some))
                    if len(under_way) > _UNDER_WAY:
                        yield from under_way[0].wait()
                        under_way.popleft()
                while under_way:
                    yield from under_way[0].wait()
                    under_way.popleft()
            finally:
                try:
                    self._copies.check()  # broken off, or failed: the memory is not ours any more after this
                finally:
                    for left in under_way:
                        wait(left.results)

    def _start(
        self, block_ids: Sequence[BlockId], blocks: Sequence[HostBlock], addresses: Sequence[int], slab: PinnedSlab
    ) -> _Part[bool]:
        """The GPU reads the slab, and so do the threads."""
        self._upload(block_ids, addresses, slab)
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
        self._upload(block_ids, [address_of(row) for row in rows], buffer)
        buffer.mark = self._copies.mark()
        return _Part(buffer.mark, results)

    def _write(self, block_ids: Sequence[BlockId], after: object, places: Sequence[HostBlock]) -> list[bytes]:
        """See BlockSource."""
        sums: list[bytes] = []
        self._copies.wait_for(after)
        with self._slabs.using(places_at := [address_of(place.data) for place in places], self.block_bytes) as slabs:
            try:
                for part, slab in _parts(slabs, self._staging.num_blocks):
                    some = places[part]
                    ids = [block_ids[place.index] for place in some]
                    if slab is not None:
                        sums += self._write_direct(ids, some, places_at[part], slab)
                    else:
                        sums += self._write_staged(ids, some)
            finally:
                self._copies.check()
        return sums

    def _write_direct(
        self, block_ids: Sequence[BlockId], places: Sequence[HostBlock], addresses: Sequence[int], slab: PinnedSlab
    ) -> list[bytes]:
        self._download(block_ids, addresses, slab)
        self._copies.mark().wait()
        return _gathered(self._by_threads(lambda place: checksum(place.data), places))

    def _write_staged(self, block_ids: Sequence[BlockId], places: Sequence[HostBlock]) -> list[bytes]:
        buffer = self._staging.turn()
        rows = [buffer.view(row) for row in range(len(places))]
        self._download(block_ids, [address_of(row) for row in rows], buffer)
        self._copies.mark().wait()

        def unload(row: int) -> bytes:
            copy_bytes(places[row].data, rows[row])
            return checksum(rows[row])

        return _gathered(self._by_threads(unload, range(len(places))))

    def _upload(self, block_ids: Sequence[BlockId], addresses: Sequence[int], memory: _Pinned) -> None:
        self._copy(block_ids, addresses, memory, self._copies.upload)

    def _download(self, block_ids: Sequence[BlockId], addresses: Sequence[int], memory: _Pinned) -> None:
        self._copy(block_ids, addresses, memory, self._copies.download_to)

    def _copy(
        self, block_ids: Sequence[BlockId], addresses: Sequence[int], memory: _Pinned, copy: Callable[[Tensor, Tensor], None]
    ) -> None:
        """Queues copies; none crosses a boundary between two registrations, where CUDA refuses it."""
        with self._copies.use(), torch.inference_mode():
            for run in copy_runs(block_ids, addresses, self.block_bytes):
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

    def fill(self, blocks: Sequence[HostBlock]) -> Generator[bool, None, None]:
        """See BlockSink."""
        return self.memory._fill(self.block_ids, self.after, blocks)


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


def _parts(slabs: Sequence[PinnedSlab | None], most: int) -> Iterator[tuple[slice, PinnedSlab | None]]:
    """Consecutive blocks of the same slab, or of none, so many at most: which ones, and their slab."""
    start = 0
    for end in range(1, len(slabs) + 1):
        if end == len(slabs) or slabs[end] is not slabs[start] or end - start == most:
            yield slice(start, end), slabs[start]
            start = end


def _is_right(block: HostBlock) -> bool:
    return checksum(block.data) == block.checksum


def _gathered(futures: Sequence["Future[list[ResultT]]"]) -> list[ResultT]:
    """All results in order, when the last thread has ended."""
    wait(futures)
    return [result for future in futures for result in future.result()]
