"""The device pool of KV blocks: one memory, block-major, that layers see as strided views.

Knows shapes and bytes. Does not know who owns which block (the scheduler does), models, or the store. Layout of a block, see
"Device block" in docs/kv-layout.md:

    | K of layer 0 | pad | V of layer 0 | pad | K of layer 1 | pad | ... | pad |     pads: parts start at multiples of 64 bytes,
    0                                                            block_bytes         a block is a multiple of 4,096 bytes

Of a pool of e4m3 each part has the exponents of its rows behind them: kernels/e4m3.py.
"""

import logging
import mmap
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from common.errors import StartupError
from common.ids import BlockId
from common.shm.slab import Slab
from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.e4m3 import row_bytes
from executor_svc.kernels.layout import KEYS_AS_COLUMNS, KvLayout
from executor_svc.kvcache.copy_threads import CopyThreads
from executor_svc.kvcache.host_buffers import HostBuffers

PART_ALIGNMENT = 64
BLOCK_ALIGNMENT = 4096
_MADV_POPULATE_WRITE = 23  # linux/mman.h; the mmap module does not name it
log = logging.getLogger(__name__)


class KvShape(Protocol):
    """What the pool asks of a layer: its heads and their sizes."""

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        ...

    @property
    def head_dim_k(self) -> int:
        """Elements of one key."""
        ...

    @property
    def head_dim_v(self) -> int:
        """Elements of one value."""
        ...


def block_bytes(layers: Sequence[KvShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block of all layers, a multiple of 4,096."""
    return part_offsets(layers, block_size, dtype)[-1]


def layer_views(
    storage: torch.Tensor, layers: Sequence[KvShape], num_blocks: int, block_size: int, layout: KvLayout
) -> list[LayerCache]:
    """What each layer sees of a pool.

    Args:
        storage: all blocks one after the other, flat, the dtype of the cache.
        layers: their number of heads and head sizes may all differ.
        num_blocks: of the pool.
        block_size: tokens per block.
        layout: of a layer's part.
    """
    offsets = part_offsets(layers, block_size, storage.dtype)
    shapes = [
        shape
        for spec in layers
        for shape in (
            layout.key_shape(spec.num_kv_heads, spec.head_dim_k, block_size),
            layout.value_shape(spec.num_kv_heads, spec.head_dim_v, block_size),
        )
    ]
    itemsize = storage.itemsize
    parts = [
        storage.as_strided((num_blocks, *shape), (offsets[-1] // itemsize, shape[1] * shape[2], shape[2], 1), offset // itemsize)
        for shape, offset in zip(shapes, offsets[:-1], strict=True)
    ]
    return [LayerCache(key, value) for key, value in zip(parts[::2], parts[1::2], strict=True)]


class KvPool:
    """KV of num_blocks blocks on the CPU. All bytes are zero at the start, and their memory is taken at once.

    Attributes:
        num_blocks, block_size, dtype, layout: as given.
        block_bytes: of one block, all layers.
        layer_caches: one per layer of layers, in their order.
        num_bytes: of the whole pool.
    """

    def __init__(
        self,
        layers: Sequence[KvShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        layout: KvLayout = KEYS_AS_COLUMNS,
    ):
        """Allocates.

        Args:
            layers: their number of heads and head sizes may all differ.
            num_blocks: at least one.
            block_size: tokens per block.
            dtype: of keys and values.
            layout: of a layer's part of a block.

        Raises:
            StartupError: the memory is not there.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.layout = layout
        self.block_bytes = block_bytes(layers, block_size, dtype)
        self.num_bytes = num_blocks * self.block_bytes
        try:
            self._memory = mmap.mmap(-1, self.num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise StartupError(
                f"no memory for a KV pool of {self.num_bytes:,} bytes ({num_blocks} blocks of {self.block_bytes:,}): {error}; "
                "lower --kv-memory-bytes or --num-blocks"
            ) from error
        self._blocks = np.frombuffer(self._memory, np.uint8).reshape(num_blocks, self.block_bytes)
        assert self._blocks.ctypes.data % BLOCK_ALIGNMENT == 0, "the pool does not start at a page"
        self._take_memory()
        self._copy_threads = CopyThreads()
        storage = torch.from_numpy(self._blocks.reshape(-1)).view(dtype)
        self.layer_caches = layer_views(storage, layers, num_blocks, block_size, layout)

    def block_view(self, block_id: BlockId) -> memoryview:
        """The bytes of one block, writable, block_bytes long."""
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id}: the pool has {self.num_blocks}")
        return memoryview(self._memory)[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def slabs_mapped(self, slabs: Sequence[Slab]) -> None:
        """As BlockMemory of executor_svc/transfer.py: plain copies need nothing of the memory that they read and write."""

    def slabs_unmapped(self, slabs: Sequence[Slab]) -> None:
        """As BlockMemory: nothing is held."""

    def mark(self) -> None:
        """As BlockMemory: a step is over when the call that ran it returns."""

    def sink(self, block_ids: Sequence[BlockId], after: object) -> HostBuffers:
        """As BlockMemory: the blocks themselves."""
        return HostBuffers([self.block_view(block_id) for block_id in block_ids], self.block_bytes, self._copy_threads)

    def source(self, block_ids: Sequence[BlockId], after: object) -> HostBuffers:
        """As BlockMemory: the blocks themselves."""
        return self.sink(block_ids, after)

    def copy_blocks(self, pairs: Iterable[tuple[BlockId, BlockId]]) -> None:
        """Copies whole blocks, (source, destination), one after the other."""
        for source, destination in pairs:
            self._blocks[destination] = self._blocks[source]

    def zero(self) -> None:
        """Sets every byte to zero."""
        self._blocks.fill(0)

    def _take_memory(self) -> None:
        """Has the system hand out every page now, zeroed, instead of in the middle of a step."""
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            log.info("this kernel has no huge pages; the KV pool lies in small ones")
        try:
            self._memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:  # Linux before 5.14
            self.zero()

    def check_integrity(self) -> None:
        """Raises AssertionError when views and blocks do not belong together."""
        assert self.block_bytes % BLOCK_ALIGNMENT == 0
        start = self._blocks.ctypes.data
        for cache in self.layer_caches:
            for part in (cache.key, cache.value):
                assert (part.data_ptr() - start) % PART_ALIGNMENT == 0, "a layer's part is not aligned"
                assert part.stride(0) * part.element_size() == self.block_bytes
                assert start <= part.data_ptr() < start + self.block_bytes


def part_offsets(layers: Sequence[KvShape], block_size: int, dtype: torch.dtype) -> list[int]:
    """Byte offsets of K and V of every layer in a block, then the bytes of the block."""
    offsets, end = [], 0
    for spec in layers:
        for head_dim in (spec.head_dim_k, spec.head_dim_v):
            offsets.append(end)
            end += round_up(spec.num_kv_heads * block_size * row_bytes(head_dim, dtype), PART_ALIGNMENT)
    return [*offsets, round_up(end, BLOCK_ALIGNMENT)]


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple
