"""What the GPU's transfers cost beside their copies, measured without a GPU: copies take the time that they would take.

    python -m bench.transfer_paced        JSON lines: milliseconds beside the copies; GB/s of saves beside memcpy

The code is that of a GPU (executor_svc/cuda/blocks.py) over a pool in host memory, with a real block store; only the copy engine
is made up. For milliseconds, blocks have 4 KiB and each copy takes as long as 2 MiB a block would take at 55 GB/s, so that
bytes cost nothing and all else is there. For GB/s, blocks have 2 MiB and the engine is a thread that copies.
"""

import argparse
import json
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.transfer_gpu import KvShape
from common.cpu_cores import usable_cores
from common.degraded import DegradedPaths
from common.ids import BlockId, BlockKey
from common.patience import Patience
from common.switch_interval import switch_often
from executor_svc.clients.kvstore import BlockStoreClient
from executor_svc.cuda.blocks import CudaBlocks
from executor_svc.cuda.pinned_slabs import PinnedSlabs
from executor_svc.kernels.layout import KEYS_AS_ROWS
from executor_svc.kvcache.cuda_pool import CudaKvPool
from executor_svc.transfer import Load, LoadDone, Save, SaveDone, TransferThread
from tests.integration.kvstore_svc.store_process import FINGERPRINT, MIB, StoreProcess

LINK_BYTES_PER_S = 55e9
_TIMEOUT_S = 60.0
SMALL, LARGE = [KvShape(1, 32, 32)], [KvShape()] * 32
"""Layers of blocks of 4 KiB and of 2 MiB."""


class Registers:
    """A Registrar that says yes."""

    def register(self, address: int, num_bytes: int) -> None:
        """See Registrar."""

    def unregister(self, address: int) -> None:
        """See Registrar."""


@dataclass
class TimeMark:
    """Over at a time."""

    at_s: float

    def is_over(self) -> bool:
        """See Mark."""
        return time.monotonic() >= self.at_s

    def wait(self) -> None:
        """See Mark."""
        if (left_s := self.at_s - time.monotonic()) > 0:
            time.sleep(left_s)


class _Stream:
    """What both engines have in common."""

    device = torch.device("cpu")

    def use(self) -> AbstractContextManager[object]:
        """See CopyStream."""
        return nullcontext()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """See CopyStream."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def wait_for(self, mark: object) -> None:
        """See CopyStream."""


class PacedStream(_Stream):
    """Copies nothing, in the time that copying would take.

    Attributes:
        busy_s: of all copies.
    """

    def __init__(self, seconds_per_byte: float):
        self.busy_s = 0.0
        self._seconds_per_byte = seconds_per_byte
        self._free_at_s = 0.0

    def upload(self, host: Tensor, device: Tensor) -> None:
        """See CopyStream."""
        seconds = host.numel() * self._seconds_per_byte
        self.busy_s += seconds
        self._free_at_s = max(time.monotonic(), self._free_at_s) + seconds

    download_to = upload

    def mark(self) -> TimeMark:
        """See CopyStream."""
        return TimeMark(self._free_at_s)

    def check(self) -> None:
        """See CopyStream."""
        self.mark().wait()


class FutureMark:
    """Over when a thread is through."""

    def __init__(self, future: "Future[None]"):
        self._future = future

    def is_over(self) -> bool:
        """See Mark."""
        return self._future.done()

    def wait(self) -> None:
        """See Mark."""
        self._future.result()


class ThreadStream(_Stream):
    """A thread that copies, in order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copy engine")
        self._last: Future[None] = self._thread.submit(lambda: None)

    def upload(self, host: Tensor, device: Tensor) -> None:
        """See CopyStream."""
        self._queue(device, host)

    def download_to(self, host: Tensor, device: Tensor) -> None:
        """See CopyStream."""
        self._queue(host, device)

    def mark(self) -> FutureMark:
        """See CopyStream."""
        return FutureMark(self._last)

    def check(self) -> None:
        """See CopyStream."""
        self._last.result()

    def _queue(self, into: Tensor, data: Tensor) -> None:
        def copy() -> None:
            with torch.inference_mode():
                into.copy_(data)

        self._last = self._thread.submit(copy)


class Rig:
    """A store, a client and a pool; one transfer at a time."""

    def __init__(
        self, store: StoreProcess, layers: list[KvShape], num_blocks: int, stream: PacedStream | ThreadStream, threads: int
    ):
        self._num_blocks = num_blocks
        self._pool = CudaKvPool(layers, num_blocks, 16, torch.bfloat16, KEYS_AS_ROWS, torch.device("cpu"))
        self._pool.blocks.random_(0, 256)
        slabs = PinnedSlabs(Registers(), DegradedPaths())
        memory = CudaBlocks(self._pool, stream, stream, slabs, num_threads=threads)  # type: ignore[arg-type]
        self._client = BlockStoreClient(
            store.address,
            client_id="bench",
            layout_fingerprint=FINGERPRINT,
            block_bytes=self._pool.block_bytes,
            transport="shm",
            degraded=DegradedPaths(),
            slab_user=memory,
        )
        self._client.connect(_TIMEOUT_S)
        assert slabs.wait_idle(_TIMEOUT_S)
        self._outcomes: queue.Queue[LoadDone | SaveDone] = queue.Queue()
        self._transfers = TransferThread(memory, self._client, lambda session, done: self._outcomes.put(done))
        self._transfers.start_session(1)

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return self._pool.num_bytes

    def save_s(self, first_key: int) -> float:
        """Time to save all blocks under new keys."""
        started_s = time.perf_counter()
        self._transfers.submit(1, Save(first_key, self._blocks(first_key)))
        done = self._outcomes.get(timeout=_TIMEOUT_S)
        assert isinstance(done, SaveDone) and done.num_written == self._num_blocks, done
        return time.perf_counter() - started_s

    def load_s(self, first_key: int) -> float:
        """Time to load all of them."""
        started_s = time.perf_counter()
        self._transfers.submit(1, Load(first_key, self._blocks(first_key), Patience(_TIMEOUT_S)))
        done = self._outcomes.get(timeout=_TIMEOUT_S)
        assert isinstance(done, LoadDone) and done.num_loaded == self._num_blocks, done
        return time.perf_counter() - started_s

    def close(self) -> None:
        """Ends the client."""
        self._transfers.stop()
        self._client.close()

    def _blocks(self, first_key: int) -> list[tuple[BlockKey, BlockId]]:
        return [(BlockKey((first_key + i).to_bytes(32, "big")), BlockId(i)) for i in range(self._num_blocks)]


@contextmanager
def rig(
    layers: list[KvShape], num_blocks: int, stream: PacedStream | ThreadStream, threads: int, store_bytes: int
) -> Iterator[Rig]:
    """A rig with a store of its own."""
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(StoreProcess(Path(folder), "--capacity-bytes", str(store_bytes))) as store,
        closing(Rig(store, layers, num_blocks, stream, threads)) as made,
    ):
        yield made


def beside_copies(num_blocks: int, repeats: int, threads: int) -> None:
    """Milliseconds and CPU of the transfer's process, beyond the copies'."""
    stream = PacedStream(2 * MIB / 4096 / LINK_BYTES_PER_S)
    with rig(SMALL, num_blocks, stream, threads, 256 * MIB) as made:
        for name, work in (("save", made.save_s), ("load", made.load_s)):
            found = [taken(work, 1_000_000 * (1 + number), stream) for number in range(repeats)]
            all_ms, beside_ms, cpu_ms = (1e3 * statistics.median(column) for column in zip(*found, strict=True))
            say(f"{name} of {num_blocks} blocks", ms=all_ms, beside_copies_ms=beside_ms, cpu_ms=cpu_ms)


def taken(work: Callable[[int], float], first_key: int, stream: PacedStream) -> tuple[float, float, float]:
    """Seconds, those beside copies, and those of this process's CPU."""
    copied_s, cpu_s = stream.busy_s, time.process_time()
    seconds = work(first_key)
    return seconds, seconds - (stream.busy_s - copied_s), time.process_time() - cpu_s


def beside_memcpy(num_blocks: int, repeats: int, threads: int) -> None:
    """GB/s of saves and loads, and of memcpy alone in between."""
    with rig(LARGE, num_blocks, ThreadStream(), threads, 2 * num_blocks * 2 * MIB + 512 * MIB) as made:
        host, there = torch.ones(made.num_bytes, dtype=torch.uint8), torch.zeros(made.num_bytes, dtype=torch.uint8)
        ratios: dict[str, list[float]] = {"save": [], "load": []}
        for number in range(repeats + 1):
            started_s = time.perf_counter()
            host.copy_(there)
            raw_s = time.perf_counter() - started_s
            seconds = {"save": made.save_s(1_000_000 * (1 + number)), "load": made.load_s(1_000_000 * (1 + number))}
            if number:  # the first touches pages
                rates = {name: round(made.num_bytes / s / 1e9, 2) for name, s in seconds.items()}
                say("2 MiB blocks, GB/s", memcpy=made.num_bytes / raw_s / 1e9, **rates)
                for name, s in seconds.items():
                    ratios[name].append(raw_s / s)
        say("share of memcpy", **{name: statistics.median(found) for name, found in ratios.items()})


def say(what: str, **figures: float) -> None:
    """One line."""
    print(json.dumps({"what": what, **{name: round(value, 2) for name, value in figures.items()}}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-blocks", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=max(1, min(12, 3 * usable_cores() // 4)), help="that compute checksums")
    options = parser.parse_args()
    switch_often()
    beside_copies(options.num_blocks, options.repeats, options.threads)
    beside_memcpy(min(options.num_blocks, 200), 5, options.threads)


if __name__ == "__main__":
    main()
