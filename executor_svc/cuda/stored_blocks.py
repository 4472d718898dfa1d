"""Blocks that are stored in a smaller form than the pool has: made on the device, so that the link carries only that.

Knows the order of kernels and copies on one stream. Does not know forms (kernels/triton/stored_form.py), host memory or stores.
The copies are those of CudaBlocks, from and to a few slots of device memory.

```
pool block ── kernel ──> slot ── copy ──> host memory                 everything on the stream of copies, in order: a slot is
pool block <── kernel ── slot <── copy ── host memory                 used again behind the kernel that read it
```
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from common.ids import BlockId
from common.shm.slab import Slab
from executor_svc.core.host_block import BlockSink, BlockSource, Filling, HostBlock
from executor_svc.cuda.stream import CopyStream, Mark
from executor_svc.kvcache.cuda_pool import CudaKvPool

_SLOTS_BYTES = 128 << 20


def most_slots(block_bytes: int) -> int:
    """As many as blocks of so many bytes ever get."""
    return max(1, _SLOTS_BYTES // block_bytes)


class BlockForm(Protocol):
    """A smaller form of blocks; what it does is queued on the current stream. See StoredFormKernels."""

    def compress(self, blocks: Tensor, block_ids: Tensor, stored: Tensor) -> None:
        """Writes some blocks of a pool in their stored form."""
        ...

    def restore(self, stored: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
        """Writes stored blocks into blocks of a pool."""
        ...


class StoredSlots:
    """Device memory of some stored blocks: what CudaBlocks takes for a pool.

    Attributes:
        num_blocks: how many.
        block_bytes: of a stored block.
        num_bytes: of all of them.
        blocks: uint8 [num_blocks, block_bytes].
    """

    def __init__(self, num_blocks: int, block_bytes: int, device: torch.device):
        """Allocates, zeroed: bytes between a stored block's parts travel, too."""
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.num_bytes = num_blocks * block_bytes
        self.blocks = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)


class SlotMemory(Protocol):
    """The BlockMemory (executor_svc/transfer.py) of the slots, by their numbers."""

    def slabs_mapped(self, slabs: Sequence[Slab]) -> None:
        """See SlabUser."""
        ...

    def slabs_unmapped(self, slabs: Sequence[Slab]) -> None:
        """See SlabUser."""
        ...

    def mark(self) -> object:
        """See BlockMemory."""
        ...

    def sink(self, block_ids: Sequence[BlockId], after: object) -> BlockSink:
        """See BlockMemory."""
        ...

    def source(self, block_ids: Sequence[BlockId], after: object) -> BlockSource:
        """See BlockMemory."""
        ...

    def close(self) -> None:
        """Lets go of all slabs."""
        ...


class StoredBlocks:
    """The BlockMemory of a pool whose blocks are stored in another form."""

    def __init__(self, pool: CudaKvPool, slots: StoredSlots, memory: SlotMemory, copies: CopyStream, form: BlockForm):
        """Puts them together.

        Args:
            pool: whose blocks travel.
            slots: where they are in their stored form.
            memory: copies from and to slots, on the stream copies.
            copies: see memory.
            form: of stored blocks.
        """
        self.num_blocks = pool.num_blocks
        self.block_bytes = slots.block_bytes
        self._pool = pool
        self._slots = slots
        self._memory = memory
        self._copies = copies
        self._form = form

    def slabs_mapped(self, slabs: Sequence[Slab]) -> None:
        """See SlabUser."""
        self._memory.slabs_mapped(slabs)

    def slabs_unmapped(self, slabs: Sequence[Slab]) -> None:
        """See SlabUser."""
        self._memory.slabs_unmapped(slabs)

    def mark(self) -> object:
        """See BlockMemory."""
        return self._memory.mark()

    def sink(self, block_ids: Sequence[BlockId], after: object) -> "_Sink":
        """See BlockMemory."""
        return _Sink(self, block_ids, after)

    def source(self, block_ids: Sequence[BlockId], after: object) -> "_Source":
        """See BlockMemory."""
        return _Source(self, block_ids, after)

    def close(self) -> None:
        """See SlotMemory."""
        self._memory.close()

    def _slot_of(self, index: int) -> BlockId:
        return BlockId(index % self._slots.num_blocks)

    def _compress(self, block_ids: Sequence[BlockId]) -> None:
        """Into the first slots."""
        self._queue(lambda ids: self._form.compress(self._pool.blocks, ids, self._slots.blocks), block_ids)

    def _restore(self, first_slot: int, block_ids: Sequence[BlockId]) -> None:
        """From neighbouring slots."""
        stored = self._slots.blocks[first_slot : first_slot + len(block_ids)]
        self._queue(lambda ids: self._form.restore(stored, ids, self._pool.blocks), block_ids)

    def _queue(self, work: Callable[[Tensor], None], block_ids: Sequence[BlockId]) -> None:
        with self._copies.use(), torch.inference_mode():
            work(torch.tensor(block_ids, dtype=torch.int64).to(self._pool.blocks.device))


@dataclass(frozen=True, slots=True)
class _Source:
    """See BlockSource."""

    blocks: StoredBlocks
    block_ids: Sequence[BlockId]
    after: object

    @property
    def block_bytes(self) -> int:
        """See BlockSource."""
        return self.blocks.block_bytes

    def write_to(self, places: Sequence[HostBlock]) -> list[bytes]:
        """See BlockSource."""
        blocks, sums = self.blocks, list[bytes]()
        blocks._copies.wait_for(self.after)
        for start in range(0, len(places), blocks._slots.num_blocks):
            some = places[start : start + blocks._slots.num_blocks]
            blocks._compress([self.block_ids[place.index] for place in some])
            slots = [BlockId(number) for number in range(len(some))]
            numbered = [replace(place, index=number) for number, place in enumerate(some)]
            sums += blocks._memory.source(slots, self.after).write_to(numbered)
        return sums


@dataclass(frozen=True, slots=True)
class _Sink:
    """See BlockSink."""

    blocks: StoredBlocks
    block_ids: Sequence[BlockId]
    after: object

    @property
    def block_bytes(self) -> int:
        """See BlockSink."""
        return self.blocks.block_bytes

    def begin(self) -> "_Filling":
        """See BlockSink."""
        slots = [self.blocks._slot_of(index) for index in range(len(self.block_ids))]
        return _Filling(self.blocks, self.block_ids, self.blocks._memory.sink(slots, self.after).begin())


class _Filling:
    """See Filling: that of the slots, and behind each of its copies the kernel that brings blocks into the pool."""

    def __init__(self, blocks: StoredBlocks, block_ids: Sequence[BlockId], slots: Filling):
        self._blocks = blocks
        self._block_ids = block_ids
        self._slots = slots
        self._num_added = self._num_told = 0
        self._restored: deque[tuple[int, Mark]] = deque()
        """Ends of kernels, and how many blocks were added before what they restore."""

    @property
    def is_under_way(self) -> bool:
        """See Filling."""
        return self._slots.is_under_way

    @property
    def is_full(self) -> bool:
        """See Filling."""
        return self._slots.is_full

    def add(self, blocks: Sequence[HostBlock]) -> None:
        """See Filling."""
        for group in self._groups(blocks):
            self._slots.add(group)
            first = self._blocks._slot_of(group[0].index)
            self._blocks._restore(first, [self._block_ids[block.index] for block in group])
            self._restored.append((self._num_added, self._blocks._copies.mark()))
            self._num_added += len(group)

    def verdicts(self) -> list[bool]:
        """See Filling."""
        found = list(self._slots.verdicts())
        self._num_told += len(found)
        while self._restored and self._restored[0][0] < self._num_told:
            self._restored.popleft()[1].wait()
        return found

    def close(self) -> None:
        """See Filling."""
        self._restored.clear()
        self._slots.close()

    def _groups(self, blocks: Sequence[HostBlock]) -> list[list[HostBlock]]:
        """Consecutive blocks whose slots are neighbours."""
        groups: list[list[HostBlock]] = []
        for block in blocks:
            goes_on = groups and block.index == groups[-1][-1].index + 1 and self._blocks._slot_of(block.index) != 0
            if goes_on:
                groups[-1].append(block)
            else:
                groups.append([block])
        return groups
