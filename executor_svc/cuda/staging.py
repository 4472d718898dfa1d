"""Pinned memory of our own, for blocks whose host memory the GPU cannot reach by itself. Knows buffers, no block.

Two buffers in turn: while one is copied to the device, the other is filled.
"""

from typing import Any

from torch import Tensor

from executor_svc.cuda.stream import CopyStream, Mark

BUFFER_BYTES = 64 << 20


class StagingBuffer:
    """Pinned memory of some blocks.

    Attributes:
        memory: uint8 [num_blocks * block_bytes].
        mark: the end of the copies out of it; None: nothing reads it.
    """

    def __init__(self, memory: Tensor, block_bytes: int):
        self.memory = memory
        self.start = memory.data_ptr()
        self.mark: Mark | None = None
        array: Any = memory.numpy()
        self._bytes = memoryview(array)
        self._block_bytes = block_bytes

    def view(self, row: int) -> memoryview:
        """The bytes of one block."""
        return self._bytes[row * self._block_bytes :][: self._block_bytes]

    def bytes_at(self, address: int, num_bytes: int) -> Tensor:
        """Uint8 [num_bytes] of it."""
        return self.memory[address - self.start : address - self.start + num_bytes]


class StagingBuffers:
    """Both of them.

    Attributes:
        num_blocks: that each holds.
    """

    def __init__(self, stream: CopyStream, block_bytes: int, buffer_bytes: int = BUFFER_BYTES):
        """Takes the memory.

        Args:
            stream: that copies from and to them are queued on.
            block_bytes: of a block; one fits in any case.
            buffer_bytes: of each buffer.
        """
        self.num_blocks = max(1, buffer_bytes // block_bytes)
        self._buffers = [StagingBuffer(stream.host_buffer(self.num_blocks * block_bytes), block_bytes) for _ in range(2)]

    def turn(self) -> StagingBuffer:
        """The buffer that was used longest ago, free again."""
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        if buffer.mark is not None:
            buffer.mark.wait()
            buffer.mark = None
        return buffer
