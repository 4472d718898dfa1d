"""Blocks between a real block store and a GPU: GB/s, and milliseconds for a prompt's worth, beside raw pinned copies.

    python -m bench.transfer_gpu        a JSON line per way and direction

On a machine without a GPU the pool is host memory and the raw copy is memcpy. Blocks are those of Llama-8B, 2 MiB each, 1,000 of
them a prompt of 16,000 tokens. Knows the executor's transfers and a store; knows no model and no request.
"""

import argparse
import json
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from common.cpu_cores import usable_cores
from common.degraded import DegradedPaths
from common.ids import BlockId, BlockKey
from common.patience import Patience
from executor_svc.clients.kvstore import BlockStoreClient
from executor_svc.cuda.blocks import CudaBlocks
from executor_svc.cuda.pinned_slabs import PinnedSlabs
from executor_svc.cuda.registrar import CudaRegistrar, Registrar
from executor_svc.cuda.stream import CudaStream
from executor_svc.kernels.layout import KEYS_AS_ROWS
from executor_svc.kvcache.cuda_pool import CudaKvPool
from executor_svc.kvcache.pool import KvPool
from executor_svc.transfer import BlockMemory, Load, LoadDone, Save, SaveDone, TransferThread
from tests.integration.kvstore_svc.store_process import FINGERPRINT, MIB, StoreProcess

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class KvShape:
    """As kvcache.pool wants a layer."""

    num_kv_heads: int = NUM_KV_HEADS
    head_dim_k: int = HEAD_DIM
    head_dim_v: int = HEAD_DIM


LAYERS = [KvShape()] * NUM_LAYERS


class NoRegistrar:
    """Refuses, so that everything is staged."""

    def register(self, address: int, num_bytes: int) -> None:
        """See Registrar."""
        raise RuntimeError("not wanted in this run")

    def unregister(self, address: int) -> None:
        """See Registrar."""


@dataclass(frozen=True)
class Way:
    """One way of carrying bytes.

    Attributes:
        ready: returns once it is at its best; says what that took.
    """

    name: str
    memory: BlockMemory
    ready: Callable[[], str]


def gpu_way(name: str, pool: CudaKvPool, registrar: Registrar, num_threads: int) -> Way:
    """Through the GPU's pool."""
    device = pool.blocks.device
    slabs = PinnedSlabs(registrar, DegradedPaths())
    memory = CudaBlocks(pool, CudaStream(device), CudaStream(device), slabs, num_threads=num_threads)

    def ready() -> str:
        started_s = time.perf_counter()
        assert slabs.wait_idle(_TIMEOUT_S), "the slabs were not registered in time"
        return f"{slabs.num_pinned_bytes >> 20} MiB pinned in {time.perf_counter() - started_s:.2f} s, {num_threads} threads"

    return Way(name, memory, ready)


def measure(way: Way, num_blocks: int, repeats: int) -> None:
    """Saves and loads through a store of its own."""
    block_bytes = 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * BLOCK_SIZE * 2
    num_bytes = num_blocks * block_bytes
    flags = ("--capacity-bytes", str(num_bytes + num_bytes // 4 + 512 * MIB))
    outcomes: queue.Queue[LoadDone | SaveDone] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder, closing(StoreProcess(Path(folder), *flags)) as store:
        client = BlockStoreClient(
            store.address,
            client_id="bench",
            layout_fingerprint=FINGERPRINT,
            block_bytes=block_bytes,
            transport="shm",
            degraded=DegradedPaths(),
            slab_user=way.memory,
        )
        client.connect(_TIMEOUT_S)
        transfers = TransferThread(way.memory, client, lambda session, done: outcomes.put(done))
        transfers.start_session(1)
        note = way.ready()
        blocks = [(BlockKey(i.to_bytes(32, "big")), BlockId(i)) for i in range(num_blocks)]
        started_s = time.perf_counter()
        transfers.submit(1, Save(1, blocks))
        saved = outcomes.get(timeout=_TIMEOUT_S)
        save_s = time.perf_counter() - started_s
        assert isinstance(saved, SaveDone) and saved.num_written == num_blocks, saved
        load_s: list[float] = []
        for load_id in range(repeats):
            started_s = time.perf_counter()
            transfers.submit(1, Load(load_id, blocks, Patience(_TIMEOUT_S)))
            loaded = outcomes.get(timeout=_TIMEOUT_S)
            load_s.append(time.perf_counter() - started_s)
            assert isinstance(loaded, LoadDone) and loaded.num_loaded == num_blocks, loaded
        transfers.stop()
        client.close()
    say(way.name, "load", num_bytes, statistics.median(load_s), note)
    say(way.name, "save", num_bytes, save_s, note)


def raw_copies(num_bytes: int, repeats: int, device: torch.device) -> None:
    """One copy of everything, each way: pinned memory on a GPU, memcpy on a CPU."""
    on_gpu = device.type == "cuda"
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    for direction, into, out in (("load", there, host), ("save", host, there)):
        seconds: list[float] = []
        for _ in range(repeats):
            started_s = time.perf_counter()
            into.copy_(out, non_blocking=True)
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started_s)
        say("raw pinned copy" if on_gpu else "raw memcpy", direction, num_bytes, statistics.median(seconds), "")


def say(way: str, direction: str, num_bytes: int, seconds: float, note: str) -> None:
    """One line."""
    line = {"way": way, "direction": direction, "GB/s": round(num_bytes / seconds / 1e9, 2), "ms": round(1e3 * seconds, 1)}
    print(json.dumps({**line, "note": note}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-blocks", type=int, default=1000 if torch.cuda.is_available() else 100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=max(1, min(12, 3 * usable_cores() // 4)), help="that compute checksums")
    parser.add_argument("--ways", default="direct,staged")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        pool = KvPool(LAYERS, options.num_blocks, BLOCK_SIZE, torch.bfloat16)
        raw_copies(pool.num_bytes, options.repeats, torch.device("cpu"))
        measure(Way("plain copies", pool, lambda: ""), options.num_blocks, options.repeats)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    gpu_pool = CudaKvPool(LAYERS, options.num_blocks, BLOCK_SIZE, torch.bfloat16, KEYS_AS_ROWS, device)
    gpu_pool.blocks.random_(0, 256)
    torch.cuda.synchronize(device)
    raw_copies(gpu_pool.num_bytes, options.repeats, device)
    registrars: dict[str, Registrar] = {"direct": CudaRegistrar(device), "staged": NoRegistrar()}
    for way in options.ways.split(","):
        measure(gpu_way(way, gpu_pool, registrars[way], options.threads), options.num_blocks, options.repeats)


if __name__ == "__main__":
    main()
