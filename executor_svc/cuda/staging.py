"""Blocks between the GPU's pool and host memory, beside the steps. Knows copies, a stream of its own and staging buffers.

Two staging buffers in turn: while one is copied to the device, the store fills the other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.ids import BlockId
from executor_svc.cuda.stream import CudaStream, Mark
from executor_svc.kvcache.cuda_pool import CudaKvPool

BUFFER_BYTES = 64 << 20


class _Buffer:
    """Pinned memory of some blocks.

    Attributes:
        mark: the end of the copy out of it; None: nothing reads it.
    """

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.mark: Mark | None = None

    def views(self, count: int) -> list[memoryview]:
        """The first blocks' bytes."""
        rows: Any = self.memory.numpy()
        return [memoryview(rows[i]) for i in range(count)]


class StagedBlocks:
    """The BlockMemory (executor_svc/transfer.py) of a GPU. All but mark belongs to the transfer thread."""

    def __init__(self, pool: CudaKvPool, steps: CudaStream, buffer_bytes: int = BUFFER_BYTES):
        """Takes the staging memory.

        Args:
            pool: whose blocks travel.
            steps: the stream that steps run on.
            buffer_bytes: of each of the two buffers; a block fits in any case.
        """
        self.num_blocks = pool.num_blocks
        self._pool = pool
        self._steps = steps
        self._stream = CudaStream(steps.device)
        self._blocks_at_once = max(1, min(pool.num_blocks, buffer_bytes // pool.block_bytes))
        num_bytes = self._blocks_at_once * pool.block_bytes
        self._buffers = [
            _Buffer(self._stream.host_buffer(num_bytes).view(self._blocks_at_once, pool.block_bytes)) for _ in range(2)
        ]

    @property
    def blocks_at_once(self) -> int:
        """See BlockMemory."""
        return self._blocks_at_once

    def mark(self) -> Mark:
        """See BlockMemory."""
        return self._steps.mark()

    def read(self, block_ids: Sequence[BlockId], after: object) -> Sequence[memoryview]:
        """See BlockMemory."""
        buffer = self._turn()
        self._stream.wait_for(after)
        with self._stream.use(), torch.inference_mode():
            for row, block_id in enumerate(block_ids):
                buffer.memory[row].copy_(self._pool.blocks[block_id], non_blocking=True)
        self._stream.check()
        return buffer.views(len(block_ids))

    def buffers(self, block_ids: Sequence[BlockId]) -> Sequence[memoryview]:
        """See BlockMemory."""
        return self._turn().views(len(block_ids))

    def write(self, block_ids: Sequence[BlockId], after: object) -> None:
        """See BlockMemory."""
        buffer = self._buffers[-1]
        self._stream.wait_for(after)
        with self._stream.use(), torch.inference_mode():
            for row, block_id in enumerate(block_ids):
                self._pool.blocks[block_id].copy_(buffer.memory[row], non_blocking=True)
        buffer.mark = self._stream.mark()

    def finish(self) -> None:
        """See BlockMemory."""
        self._stream.check()

    def _turn(self) -> _Buffer:
        """The buffer that was used longest ago, free again."""
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        if buffer.mark is not None:
            buffer.mark.wait()
            buffer.mark = None
        return buffer
