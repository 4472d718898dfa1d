"""Bandwidth of each tier of the block store beside the raw limits of this machine, measured in the same run.

    python -m bench.kv [--block-kib 720] [--num-blocks 256] [--repeats 5] [--folder FOLDER] [--tiers shm disk redis]

Each tier is a function that adds figures: what the tier does, and what the machine does without it. Both sides are measured in
turn and the medians are shown with their ratio: what is wanted is 70 % or more.

- shared memory: blocks saved by a client of a real store and loaded again, hashed on the way, beside a memcpy between the same
  kinds of memory. memcpy is one thread's; what two reach is printed too, because the client copies with two.
- disk: blocks of the disk tier read and written, cold, beside sequential preadv and pwritev with O_DIRECT by as many threads;
  where the file system has no O_DIRECT, with the page cache emptied of the file.
- Redis: see bench/kv_redis.py.
"""

import argparse
import asyncio
import ctypes
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import kv_redis
from bench.figures import Figures
from common.clock import MonotonicClock
from common.degraded import DegradedPaths
from common.ids import BlockKey
from common.patience import Patience
from common.shm.checksum import checksum
from executor_svc.kvcache.host_buffers import copy_bytes
from kvstore_svc.core.block import Layout
from kvstore_svc.core.disk_record import slot_bytes
from kvstore_svc.tiers.base import StoredBlock
from kvstore_svc.tiers.disk import open_disk_tier
from kvstore_svc.tiers.disk_segment import SegmentFile
from octavo.kvstore.v1 import kv_store_admin_service_pb2 as admin_pb
from octavo.kvstore.v1 import kv_store_admin_service_pb2_grpc as admin_grpc
from tests.integration.kvstore_svc.store_process import StoreProcess

MIB = 1 << 20
_TIMEOUT_S = 60.0
_IN_FLIGHT = 4


@dataclass(frozen=True)
class Run:
    """What is measured, and where.

    Attributes:
        block_bytes: of each block.
        num_blocks: read or written at a time.
        repeats: of each measurement.
        folder: on the disk to be measured.
    """

    block_bytes: int
    num_blocks: int
    repeats: int
    folder: Path | None
    figures: Figures

    @property
    def num_bytes(self) -> int:
        """Of one measurement."""
        return self.block_bytes * self.num_blocks

    def compare(self, workload: str, tier: Callable[[], object], limit: Callable[[], object]) -> None:
        """Measures both in turn."""
        seconds: dict[str, list[float]] = {"octavo": [], "limit": []}
        for _ in range(self.repeats):
            seconds["octavo"].append(timed(tier))
            seconds["limit"].append(timed(limit))
        self.add(workload, seconds)

    def add(self, workload: str, seconds: dict[str, list[float]]) -> None:
        """Takes in what was measured, by peer."""
        for peer, values in seconds.items():
            self.figures.add(workload, "bandwidth", self.num_bytes / statistics.median(values) / 1e9, "GB/s", peer)


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def memory(num_bytes: int) -> memoryview:
    """Aligned, and filled with something that is there."""
    view = memoryview(mmap.mmap(-1, num_bytes))
    view[:] = os.urandom(4096) * (num_bytes // 4096) + bytes(num_bytes % 4096)
    return view


# Shared memory


def shared_memory(run: Run) -> None:
    """A client in this process, the store in one of its own."""
    here = [memory(run.block_bytes) for _ in range(run.num_blocks)]
    there = memory(run.num_bytes)
    shelf = memoryview(_memfd(run.num_bytes))
    flags = ("--capacity-bytes", str(2 * run.num_bytes + 16 * MIB), "--slab-bytes", str(2 * run.num_bytes + 16 * MIB))
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(StoreProcess(Path(folder), *flags)) as store,
        closing(store.client("shm", block_bytes=run.block_bytes)) as client,
    ):
        rounds = iter(range(1000))

        def save() -> None:
            first = next(rounds) * run.num_blocks
            report = client.save([(key(first + i), data) for i, data in enumerate(here)])
            assert report.num_written == run.num_blocks, report

        def load() -> None:
            blocks = [(key(first + i), there[i * run.block_bytes :][: run.block_bytes]) for i in range(run.num_blocks)]
            assert client.load(blocks, Patience(_TIMEOUT_S)).num_loaded == run.num_blocks

        def copy(into: memoryview, out: Sequence[memoryview]) -> None:
            for index, data in enumerate(out):
                _memcpy(into[index * run.block_bytes :][: run.block_bytes], data)

        save()
        run.compare("shm save", save, lambda: copy(shelf, here))
        first = (next(rounds) - 1) * run.num_blocks
        lying = [shelf[i * run.block_bytes :][: run.block_bytes] for i in range(run.num_blocks)]
        load()
        run.compare("shm load", load, lambda: copy(there, lying))
        pairs = list(zip(here, lying, strict=True))
        by_two_s = [timed(lambda: by_threads(run.num_blocks, lambda i: copy_bytes(*pairs[i]), 2)) for _ in range(run.repeats)]
        print(f"memcpy by two threads: {run.num_bytes / statistics.median(by_two_s) / 1e9:.2f} GB/s", file=sys.stderr)


def _memfd(num_bytes: int) -> mmap.mmap:
    """Memory of the kind that slabs are made of."""
    fd = os.memfd_create("bench")
    os.ftruncate(fd, num_bytes)
    mapping = mmap.mmap(fd, num_bytes)
    os.close(fd)
    return mapping


def _memcpy(into: memoryview, data: memoryview) -> None:
    address = ctypes.addressof(ctypes.c_char.from_buffer(into))
    ctypes.memmove(address, ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))


# Disk


def disk(run: Run) -> None:
    """The tier as the store has it, without the store around it."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-", dir=run.folder) as name, asyncio.Runner() as runner:
        folder, layout = Path(name), Layout(b"f" * 32, run.block_bytes)
        slots = [memory(slot_bytes(run.block_bytes))[: run.block_bytes] for _ in range(_IN_FLIGHT)]
        sums = [checksum(slot) for slot in slots]
        raw = SegmentFile.create(folder, 1, slot_bytes(run.block_bytes), run.num_blocks)
        capacity = 2 * slot_bytes(run.block_bytes) * run.num_blocks
        tier = open_disk_tier(
            folder / "tier", "bench",
            capacity_bytes=capacity, segment_bytes=capacity // 8, clock=MonotonicClock(), degraded=DegradedPaths(),
        )  # fmt: skip
        next_first = 0

        async def put(index: int) -> None:
            lane = index % _IN_FLIGHT
            assert await tier.put(StoredBlock(key(next_first + index), layout, sums[lane]), slots[lane])

        async def put_all() -> None:
            nonlocal next_first
            next_first += run.num_blocks
            await in_flight(run.num_blocks, put)
            assert await tier.flush()

        async def get(index: int) -> None:
            found = await tier.get(key(next_first + index), slots[index % _IN_FLIGHT])
            assert found is not None and found.measured == sums[index % _IN_FLIGHT]

        def write_raw() -> None:
            by_threads(run.num_blocks, lambda index: raw.write(index, b"", slots[index % _IN_FLIGHT]))
            raw.sync()

        def read_raw() -> None:
            by_threads(run.num_blocks, lambda index: raw.read(index, slots[index % _IN_FLIGHT]))

        for _ in range(2):  # every slot of both has been written once
            runner.run(put_all())
        write_raw()
        run.compare("disk write", lambda: runner.run(put_all()), write_raw)
        run.compare("disk read", lambda: runner.run(in_flight(run.num_blocks, get)), read_raw)
        _through_the_store(run, folder, read_raw)
        print(f"disk: {'O_DIRECT' if raw.is_direct else 'through the page cache'}", file=sys.stderr)
        runner.run(tier.close())
        raw.remove()


def _through_the_store(run: Run, folder: Path, read_raw: Callable[[], None]) -> None:
    """Loads of a client whose blocks only the disk has: after each restart of a store."""
    capacity = run.num_bytes + 64 * MIB
    flags = ("--capacity-bytes", str(capacity), "--slab-bytes", str(capacity), "--disk-segment-bytes", str(64 * MIB))
    there = memory(run.num_bytes)
    blocks = [(key(i), there[i * run.block_bytes :][: run.block_bytes]) for i in range(run.num_blocks)]
    with closing(StoreProcess(folder, *flags, "--disk-capacity-bytes", str(2 * capacity))) as store:
        with closing(store.client("shm", block_bytes=run.block_bytes)) as client:
            assert client.save(blocks).num_written == run.num_blocks
        admin = admin_grpc.KvStoreAdminServiceStub(store.channel)
        answer = admin.PersistBlocks(admin_pb.PersistBlocksRequest(keys=[k for k, _ in blocks]), timeout=_TIMEOUT_S)
        assert all(answer.durable)
        seconds: dict[str, list[float]] = {"octavo": [], "limit": []}
        for _ in range(min(3, run.repeats)):
            store.stop()
            store.restart()
            store.wait_ready()
            with closing(store.client("shm", block_bytes=run.block_bytes)) as client:
                client.connect(_TIMEOUT_S)
                seconds["octavo"].append(timed(lambda c=client: c.load(blocks, Patience(_TIMEOUT_S))))  # type: ignore[misc]
            seconds["limit"].append(timed(read_raw))
        run.add("disk load by a client", seconds)


async def in_flight(num_blocks: int, work: Callable[[int], Awaitable[None]]) -> None:
    """All blocks in order, so many at once."""
    indices = iter(range(num_blocks))

    async def lane() -> None:
        for index in indices:
            await work(index)

    await asyncio.gather(*(lane() for _ in range(_IN_FLIGHT)))


def by_threads(num_blocks: int, work: Callable[[int], object], num_threads: int = _IN_FLIGHT) -> None:
    """The same by threads, which do nothing else."""
    indices = iter(range(num_blocks))

    def lane() -> None:
        for index in indices:
            work(index)

    with ThreadPoolExecutor(num_threads) as threads:
        for future in [threads.submit(lane) for _ in range(num_threads)]:
            future.result()


# All


def redis(run: Run) -> None:
    """Blocks of the Redis tier, beside raw GETs and SETs of the same server."""
    kv_redis.measure(run.figures, block_bytes=run.block_bytes, num_rounds=run.repeats)


TIERS: dict[str, Callable[[Run], None]] = {"shm": shared_memory, "disk": disk, "redis": redis}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument("--block-kib", type=int, default=720, help="of a block; 720: 16 tokens of SmolLM2-135M in float32")
    parser.add_argument("--num-blocks", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    options = parser.parse_args()
    figures = Figures()
    for name in options.tiers:
        TIERS[name](Run(options.block_kib << 10, options.num_blocks, options.repeats, options.folder, figures))
    print_ratios(figures)


def print_ratios(figures: Figures) -> None:
    """One row per measurement."""
    table = Table("what", "Octavo GB/s", "limit GB/s", "share")
    for workload in dict.fromkeys(str(row["workload"]) for row in figures.rows):
        ours, limit = (figures.value(workload, "bandwidth", peer) for peer in ("octavo", "limit"))
        table.add_row(workload, f"{ours:.2f}", f"{limit:.2f}", f"{ours / limit:.0%}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
