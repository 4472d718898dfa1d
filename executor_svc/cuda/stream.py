"""The GPU's queue of work as the runner sees it. Knows streams, events and pinned memory; no model, no batch.

Everything that a step does is queued on one stream, in order; a mark is a point of that queue. Tests put a queue on the CPU in
its place.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

ResultT = TypeVar("ResultT")


class Mark(Protocol):
    """A point in the queue."""

    def is_over(self) -> bool:
        """Whether everything before it is done."""
        ...

    def wait(self) -> None:
        """Returns when everything before it is done; other threads run meanwhile. Raises what the device failed with."""
        ...


class DeviceStream(Protocol):
    """A queue of work.

    Attributes:
        device: whose work it is.
    """

    device: torch.device

    def use(self) -> AbstractContextManager[object]:
        """Work that the with block starts is queued here."""
        ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Uint8 [num_bytes] of host memory that copies need no detour for."""
        ...

    def upload(self, host: Tensor, device: Tensor) -> None:
        """Queues a copy to the device; host must not change before the next mark is over."""
        ...

    def download(self, device: Tensor) -> Tensor:
        """Queues a copy to the host, which is good once the next mark is over."""
        ...

    def mark(self) -> Mark:
        """The end of the queue as it is now."""
        ...

    def check(self) -> None:
        """Waits for the end of the queue. Raises what the device failed with."""
        ...

    def capture(self, work: Callable[[], ResultT]) -> tuple[Callable[[], None], ResultT]:
        """Takes down work instead of queueing it. Within use; the same work has run before.

        Returns:
            A function that queues the work, over the memory that it had when it was taken down; and the work's result, which
            is good from then on until other captured work is queued.

        Raises:
            Exception: the work waits for the device, or does something else that cannot be taken down.
        """
        ...


class CopyStream(Protocol):
    """A queue of copies between host memory and the device, beside the steps."""

    def use(self) -> AbstractContextManager[object]:
        """Work that the with block starts is queued here."""
        ...

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Uint8 [num_bytes] of host memory that copies need no detour for."""
        ...

    def upload(self, host: Tensor, device: Tensor) -> None:
        """Queues a copy to the device; host must not change before the next mark is over."""
        ...

    def download_to(self, host: Tensor, device: Tensor) -> None:
        """Queues a copy to host memory, which is good once the next mark is over."""
        ...

    def wait_for(self, mark: object) -> None:
        """Work queued here from now on starts after a mark of another stream."""
        ...

    def mark(self) -> Mark:
        """The end of the queue as it is now."""
        ...

    def check(self) -> None:
        """Waits for the end of the queue. Raises what the device failed with."""
        ...


class _EventMark:
    """A CUDA event."""

    def __init__(self, event: Any):
        self.event = event

    def is_over(self) -> bool:
        """See Mark."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See Mark."""
        self.event.synchronize()


class CudaStream:
    """A stream of one GPU."""

    def __init__(self, device: torch.device):
        self.device = device
        torch.cuda.synchronize(device)  # what was made on the default stream is there
        stream_class: Any = torch.cuda.Stream  # untyped
        self.stream = stream_class(device)
        self._graph_memory = torch.cuda.graph_pool_handle()

    def use(self) -> AbstractContextManager[object]:
        """See DeviceStream."""
        return torch.cuda.stream(self.stream)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """See DeviceStream."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, host: Tensor, device: Tensor) -> None:
        """See DeviceStream."""
        device.copy_(host, non_blocking=True)

    def download(self, device: Tensor) -> Tensor:
        """See DeviceStream."""
        host = torch.empty(device.shape, dtype=device.dtype, pin_memory=True)
        return host.copy_(device, non_blocking=True)

    def download_to(self, host: Tensor, device: Tensor) -> None:
        """See CopyStream."""
        host.copy_(device, non_blocking=True)

    def mark(self) -> _EventMark:
        """See DeviceStream."""
        return _EventMark(self.stream.record_event())

    def check(self) -> None:
        """See DeviceStream."""
        self.stream.synchronize()

    def capture(self, work: Callable[[], ResultT]) -> tuple[Callable[[], None], ResultT]:
        """See DeviceStream: a CUDA graph. All graphs share one memory, which the largest needs: capture that first."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
        return graph.replay, result

    def wait_for(self, mark: object) -> None:
        """See CopyStream."""
        assert isinstance(mark, _EventMark)
        self.stream.wait_event(mark.event)
