"""A step's numbers on their way to the device: many arrays, one copy. Knows arrays and a stream, not what they mean.

Host buffers are used in turn; each is free again when the step that it served is over.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.cuda.stream import DeviceStream, Mark

ALIGNMENT = 16
_NUM_BUFFERS = 32
_SMALLEST = 1 << 16
_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
Array = npt.NDArray[Any]


class _HostBuffer:
    """One of the host buffers.

    Attributes:
        mark: of the step that reads it; None: it is free.
    """

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.array = memory.numpy()
        self.mark: Mark | None = None


class Uploads:
    """Sends arrays to one device. Not for several threads."""

    def __init__(self, stream: DeviceStream):
        self._stream = stream
        self._buffers = [_HostBuffer(stream.host_buffer(_SMALLEST)) for _ in range(_NUM_BUFFERS)]
        self._next = 0
        self._in_use: list[_HostBuffer] = []

    def send(self, arrays: Sequence[Array], into: Tensor | None = None) -> list[Tensor]:
        """Queues a copy of arrays.

        Args:
            arrays: int32, int64, float32 or float64, contiguous.
            into: uint8, memory on the device that they go to, each behind the one before; None: new memory.

        Returns:
            The arrays on the device, in the same order, shapes and dtypes.
        """
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        buffer = self._free_buffer(end)
        for array, offset in zip(arrays, offsets, strict=True):
            buffer.array[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        if into is None:
            into = torch.empty(end, dtype=torch.uint8, device=self._stream.device)
        self._stream.upload(buffer.memory[:end], into[:end])
        return [
            into[offset : offset + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def guard(self, mark: Mark) -> None:
        """What was sent since the last call has left the host when mark is over."""
        for buffer in self._in_use:
            buffer.mark = mark
        self._in_use.clear()

    def _free_buffer(self, num_bytes: int) -> _HostBuffer:
        if len(self._in_use) == _NUM_BUFFERS:  # one step sent a great deal
            self.guard(self._stream.mark())
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % _NUM_BUFFERS
        if buffer.mark is not None:
            buffer.mark.wait()
            buffer.mark = None
        if buffer.memory.shape[0] < num_bytes:
            fresh = _HostBuffer(self._stream.host_buffer(1 << (num_bytes - 1).bit_length()))
            buffer.memory, buffer.array = fresh.memory, fresh.array
        self._in_use.append(buffer)
        return buffer
