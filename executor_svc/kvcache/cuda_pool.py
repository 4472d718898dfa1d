"""The pool of KV blocks in a GPU's memory; blocks lie as in pool.py.

Knows shapes and bytes. Does not know who owns which block, models, or the store. Everything it does is queued on the current
stream.
"""

from collections.abc import Sequence

import torch

from common.errors import StartupError
from common.ids import BlockId
from executor_svc.kernels.layout import KvLayout
from executor_svc.kvcache.pool import BLOCK_ALIGNMENT, PART_ALIGNMENT, KvShape, block_bytes, layer_views


class CudaKvPool:
    """KV of num_blocks blocks. All bytes are zero at the start.

    Attributes:
        num_blocks, block_size, dtype, layout: as given.
        blocks: uint8 [num_blocks, block_bytes].
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
        layout: KvLayout,
        device: torch.device,
    ):
        """Allocates.

        Args:
            layers: their number of heads and head sizes may all differ.
            num_blocks: at least one.
            block_size: tokens per block.
            dtype: of keys and values; e4m3 with the layout ROWS_OF_E4M3.
            layout: of a layer's part of a block.
            device: whose memory it is.

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
            self.blocks = torch.zeros(num_blocks, self.block_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError, or a size that no memory has
            raise StartupError(
                f"no memory on {device} for a KV pool of {self.num_bytes:,} bytes ({num_blocks} blocks of "
                f"{self.block_bytes:,}): lower --kv-memory-bytes, --num-blocks or --gpu-memory-utilization"
            ) from error
        self.layer_caches = layer_views(self.blocks.view(-1).view(dtype), layers, num_blocks, block_size, layout)

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Queues copies of whole blocks, (source, destination), one after the other."""
        for source, destination in pairs:
            self.blocks[destination].copy_(self.blocks[source])

    def zero(self) -> None:
        """Sets every byte to zero."""
        self.blocks.zero_()

    def check_integrity(self) -> None:
        """Raises AssertionError when views and blocks do not belong together."""
        assert self.block_bytes % BLOCK_ALIGNMENT == 0
        start = self.blocks.data_ptr()
        for cache in self.layer_caches:
            for part in (cache.key, cache.value):
                assert (part.data_ptr() - start) % PART_ALIGNMENT == 0, "a layer's part is not aligned"
                assert part.stride(0) * part.element_size() == self.block_bytes
                assert start <= part.data_ptr() < start + self.block_bytes
