"""A queue of work on the CPU in place of a GPU's: results come when their mark is waited for, or later, and not before."""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from executor_svc.core.plan import BatchLimits
from executor_svc.cuda.runner import CudaRunner
from executor_svc.cuda.sampler import draw_on_host
from executor_svc.engine import Engine
from executor_svc.kernels.torch_backend import TorchBackend
from executor_svc.kvcache.pool import KvPool
from executor_svc.model.load import LoadedModel
from executor_svc.runner import ModelRunner

UNREAD = 77_777


class HostMark:
    """Over when somebody waited for it, which takes until the queue's gate is open."""

    def __init__(self, gate: threading.Event, copies: Sequence[tuple[Tensor, Tensor]]):
        self._gate = gate
        self._copies = copies
        self._lock = threading.Lock()
        self._is_over = False

    def is_over(self) -> bool:
        return self._is_over

    def wait(self) -> None:
        assert self._is_over or self._gate.wait(10), "nobody opened the gate"
        with self._lock, torch.inference_mode():
            for host, device in self._copies:
                host.copy_(device)
            self._copies = ()
            self._is_over = True


class HostQueue:
    """A DeviceStream."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.gate = threading.Event()
        self.gate.set()
        self._copies: list[tuple[Tensor, Tensor]] = []

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, host: Tensor, device: Tensor) -> None:
        device.copy_(host)

    def download(self, device: Tensor) -> Tensor:
        host = torch.full(device.shape, UNREAD, dtype=device.dtype)
        self._copies.append((host, device.clone()))
        return host

    def mark(self) -> HostMark:
        copies, self._copies = self._copies, []
        return HostMark(self.gate, copies)

    def check(self) -> None:
        pass


def queued(engine: Engine, queue: HostQueue) -> Engine:
    """The engine with its steps on a queue."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    limits: BatchLimits = runner.batch.limits
    assert isinstance(runner.model, LoadedModel)
    assert isinstance(engine.pool, KvPool)
    queued_runner = CudaRunner(
        runner.model,
        engine.pool,
        [spec.layer_idx for spec in runner.model.layer_specs],
        backend=TorchBackend(),
        draw=draw_on_host,
        limits=limits,
        stream=queue,
    )
    return replace(engine, runner=queued_runner)
