"""A queue of work on the CPU in place of a GPU's: results come when their mark is waited for, or later, and not before."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from executor_svc.core.plan import BatchLimits
from executor_svc.cuda.graphs import StepGraphs
from executor_svc.cuda.runner import CudaRunner
from executor_svc.cuda.sampler import TorchTokens, draw_on_host
from executor_svc.cuda.stream import ResultT
from executor_svc.engine import Engine
from executor_svc.kernels.backend import Backend
from executor_svc.kernels.batch import AttentionBatch, LayerCache, Rotary
from executor_svc.kernels.torch_backend import TorchBackend
from executor_svc.kvcache.pool import KvPool
from executor_svc.model.load import LoadedModel
from executor_svc.runner import ModelRunner

UNREAD = 77_777


class HostMark:
    """Over when somebody waited for it, which takes until the queue's gate is open."""

    def __init__(self, gate: threading.Event, copies: Sequence[tuple[Tensor, Tensor]], failure: Exception | None):
        self._gate = gate
        self._failure = failure
        self._copies = copies
        self._lock = threading.Lock()
        self._is_over = False

    def is_over(self) -> bool:
        return self._is_over

    def wait(self) -> None:
        assert self._is_over or self._gate.wait(10), "nobody opened the gate"
        if self._failure is not None:
            raise self._failure
        with self._lock, torch.inference_mode():
            for host, device in self._copies:
                host.copy_(device)
            self._copies = ()
            self._is_over = True


class HostQueue:
    """A DeviceStream.

    Attributes:
        gate: results come while it is set.
        failure: what the device fails with from now on.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.device = torch.device("cpu")
        self.gate = threading.Event()
        self.gate.set()
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._marks: list[HostMark] = []

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
        self._marks.append(HostMark(self.gate, copies, self.failure))
        return self._marks[-1]

    def check(self) -> None:
        for mark in self._marks:
            mark.wait()
        self._marks.clear()

    def capture(self, work: Callable[[], ResultT]) -> tuple[Callable[[], None], ResultT]:
        result: Any = work()

        def replay() -> None:
            for kept, fresh in zip(result, work(), strict=True):  # type: ignore[call-overload]
                kept.copy_(fresh)

        return replay, result


class CopyMark:
    """Over when somebody waited for it, which takes until the queue's gate is open."""

    def __init__(self, queue: "CopyQueue", num_copies: int):
        self._queue = queue
        self._num_copies = num_copies

    def is_over(self) -> bool:
        return self._queue.num_done >= self._num_copies

    def wait(self) -> None:
        self._queue.run(self._num_copies)


class CopyQueue:
    """A CopyStream: copies are made when somebody waits for their end, as late as a GPU may.

    Attributes:
        gate: copies are made while it is set.
        failure: what the device fails with from now on.
        copies: addresses of source and target, and bytes, of every copy so far.
        num_done: that have been made.
        waits: marks that work had to wait for.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.copies: list[tuple[int, int, int]] = []
        self.num_done = 0
        self.waits: list[object] = []
        self._lock = threading.Lock()
        self._tensors: list[tuple[Tensor, Tensor]] = []

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def upload(self, host: Tensor, device: Tensor) -> None:
        self._queue(host, device)

    def download_to(self, host: Tensor, device: Tensor) -> None:
        self._queue(device, host)

    def wait_for(self, mark: object) -> None:
        self.waits.append(mark)

    def mark(self) -> CopyMark:
        return CopyMark(self, len(self.copies))

    def check(self) -> None:
        self.run(len(self.copies))

    def run(self, num_copies: int) -> None:
        """Makes the first so many copies."""
        assert self.gate.wait(10), "nobody opened the gate"
        if self.failure is not None:
            raise self.failure
        with self._lock:
            while self.num_done < num_copies:
                source, target = self._tensors.pop(0)
                target.copy_(source)
                self.num_done += 1

    def _queue(self, source: Tensor, target: Tensor) -> None:
        assert source.numel() == target.numel() > 0
        self.copies.append((source.data_ptr(), target.data_ptr(), source.numel()))
        self._tensors.append((source, target))


class PaddedBackend(TorchBackend):
    """Plain attention that does as backends with graphs do: rows without keys are neither written nor attended."""

    def paged_attention(
        self, query: Tensor, key: Tensor, value: Tensor, layer_cache: LayerCache, batch: AttentionBatch, **options: Any
    ) -> Tensor:
        seqs, tokens = batch.seq_lens > 0, batch.slot_mapping >= 0
        lens = batch.cu_seqlens_q.diff()[seqs]
        out = query.new_full((query.shape[0], query.shape[1], value.shape[2]), torch.nan)
        if seqs.any():
            assert int(lens.sum()) == int(tokens.sum()), "padding rows have slots, or others none"
            some = replace(
                batch,
                slot_mapping=batch.slot_mapping[tokens],
                block_tables=batch.block_tables[seqs],
                cu_seqlens_q=torch.cat([lens.new_zeros(1), lens.cumsum(0)]),
                seq_lens=batch.seq_lens[seqs],
                num_decodes=int(seqs[: batch.num_decodes].sum()),
            )
            if options["rotary"] is not None:
                options["rotary"] = Rotary(options["rotary"].cos[tokens], options["rotary"].sin[tokens])
            out[tokens] = super().paged_attention(query[tokens], key[tokens], value[tokens], layer_cache, some, **options)
        return out


def queued(engine: Engine, queue: HostQueue, *, graphs: bool = False, backend: Backend | None = None) -> Engine:
    """The engine with its steps on a queue; graphs: decodes are captured and replayed."""
    backend = backend or PaddedBackend()
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    limits: BatchLimits = runner.batch.limits
    assert isinstance(runner.model, LoadedModel)
    assert isinstance(engine.pool, KvPool)
    queued_runner = CudaRunner(
        runner.model,
        engine.pool,
        [spec.layer_idx for spec in runner.model.layer_specs],
        backend=backend,
        tokens=TorchTokens(),
        draw=draw_on_host,
        limits=limits,
        stream=queue,
    )
    if graphs:
        queued_runner.graphs = StepGraphs(
            runner.model.forward,
            backend,
            queued_runner.layer_caches,
            limits,
            queued_runner.last_tokens,
            tokens=TorchTokens(),
            stream=queue,
            uploads=queued_runner.uploads,
        )
        queued_runner.graphs.capture(lambda text: None)
    return replace(engine, runner=queued_runner)
