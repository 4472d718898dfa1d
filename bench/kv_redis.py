"""The Redis tier beside what a client can get out of the same server at best, in the same run.

    python -m bench.kv --tiers redis [--block-kib 1024] [--repeats 5]

At best: threads that do nothing but ask and receive into a buffer that they use again, as redis-benchmark does. The tier: blocks
into shared memory, through its threads and the event loop, with headers checked and checksums computed as the store does. Server
and client share the machine, over TCP on its loopback interface.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figures
from common.clock import MonotonicClock
from common.degraded import DegradedPaths
from common.ids import BlockKey, Epoch
from common.shm.checksum import checksum
from common.shm.slab import PAGE_BYTES
from kvstore_svc.core.block import Layout
from kvstore_svc.settings import READS_PER_CONNECTION
from kvstore_svc.tiers.base import StoredBlock
from kvstore_svc.tiers.redis_tier import RedisConfig, RedisTier
from kvstore_svc.tiers.redis_value import HEADER_BYTES, redis_key
from kvstore_svc.tiers.shm import create_slabs
from tests.integration.kvstore_svc.redis_server import RedisServer

CONNECTIONS = (4, 8)
NUM_BLOCKS = 64
GIB = 1 << 30


@dataclass(frozen=True)
class Blocks:
    """What is in the server.

    Attributes:
        port: of the server.
        data: by number; the key is the number.
    """

    port: int
    block_bytes: int
    data: tuple[bytes, ...]

    def stored(self, number: int) -> StoredBlock:
        return StoredBlock(key_of(number), Layout(b"b" * 32, self.block_bytes), checksum(self.data[number]))


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def measure(figures: Figures, *, block_bytes: int = 1 << 20, num_rounds: int = 5, bytes_per_round: int = GIB) -> None:
    """Adds the rows of this tier: reads by number of connections, raw and through the tier, and writes."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = _free_port()
        server = stack.enter_context(closing(RedisServer(folder, "--port", str(port))))
        blocks = Blocks(port, block_bytes, tuple(os.urandom(block_bytes) for _ in range(NUM_BLOCKS)))
        raw_writes: list[float] = []
        tier_writes: list[float] = []
        for _ in range(num_rounds):
            server.client.flushall()
            raw_writes.append(_gb_per_s(lambda: _raw_write(blocks), NUM_BLOCKS * block_bytes))
            server.client.flushall()
            tier_writes.append(_gb_per_s(lambda: asyncio.run(_write(blocks)), NUM_BLOCKS * block_bytes))
        num_reads = bytes_per_round // block_bytes
        for num_connections in CONNECTIONS:
            raw: list[float] = []
            tier: list[float] = []
            for _ in range(num_rounds):
                raw.append(_raw(blocks, num_connections, num_reads))
                tier.append(asyncio.run(_tier(blocks, num_connections, num_reads)))
            figure = f"read, {num_connections} connections"
            _add(figures, figure, raw, tier)
        _add(figures, "write of new blocks", raw_writes, tier_writes)


def _add(figures: Figures, figure: str, raw: list[float], tier: list[float]) -> None:
    figures.add(f"redis {figure}", "bandwidth", raw, "GB/s", "limit")
    figures.add(f"redis {figure}", "bandwidth", tier, "GB/s", "octavo")


def _raw(blocks: Blocks, num_connections: int, num_reads: int) -> float:
    """GB/s of threads that only ask and receive."""
    numbers = itertools.count()
    barrier = threading.Barrier(num_connections + 1)

    def read() -> None:
        into = memoryview(bytearray(blocks.block_bytes + HEADER_BYTES + 64))
        with socket.create_connection(("127.0.0.1", blocks.port)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            barrier.wait()
            while (number := next(numbers)) < num_reads:
                key = redis_key(key_of(number % NUM_BLOCKS))
                sock.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
                num_bytes = len(b"$%d\r\n" % (blocks.block_bytes + HEADER_BYTES)) + blocks.block_bytes + HEADER_BYTES + 2
                start = 0
                while start < num_bytes:
                    start += sock.recv_into(into[start:num_bytes])

    threads = [threading.Thread(target=read) for _ in range(num_connections)]
    for thread in threads:
        thread.start()
    barrier.wait()

    def join() -> None:
        for thread in threads:
            thread.join()

    return _gb_per_s(join, num_reads * blocks.block_bytes)


def _raw_write(blocks: Blocks) -> None:
    """SET on one connection; more do not help a server that copies and allocates on one thread."""
    with socket.create_connection(("127.0.0.1", blocks.port)) as sock:
        for number, data in enumerate(blocks.data):
            key = redis_key(key_of(number))
            sock.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(data) + HEADER_BYTES))
            sock.sendall(bytes(HEADER_BYTES))
            sock.sendall(data)
            sock.sendall(b"\r\n")
            assert sock.recv(64) == b"+OK\r\n"


async def _tier(blocks: Blocks, num_connections: int, num_reads: int) -> float:
    """GB/s of the tier."""
    num_readers = READS_PER_CONNECTION * num_connections
    with _shared_memory(num_readers, blocks.block_bytes) as views:
        tier = _make_tier(blocks, num_connections)
        await asyncio.gather(*(tier.get(key_of(0), view) for view in views))  # connected
        numbers = iter(range(num_reads))

        async def read(view: memoryview) -> None:
            for number in numbers:
                found = await tier.get(key_of(number % NUM_BLOCKS), view)
                assert found is not None and found.is_intact

        started_s = time.perf_counter()
        await asyncio.gather(*(read(view) for view in views))
        seconds = time.perf_counter() - started_s
        await tier.close()
    return num_reads * blocks.block_bytes / seconds / 1e9


async def _write(blocks: Blocks) -> None:
    tier = _make_tier(blocks, max(CONNECTIONS))
    taken = await asyncio.gather(*(tier.put(blocks.stored(n), memoryview(blocks.data[n])) for n in range(NUM_BLOCKS)))
    assert all(taken)
    await tier.close()


def _make_tier(blocks: Blocks, num_connections: int) -> RedisTier:
    config = RedisConfig(f"redis://127.0.0.1:{blocks.port}", num_connections, timeout_s=10.0)
    return RedisTier(config, clock=MonotonicClock(), degraded=DegradedPaths())


@contextlib.contextmanager
def _shared_memory(num_blocks: int, block_bytes: int) -> Iterator[list[memoryview]]:
    """Room for blocks as the store has it."""
    num_pages = -(-block_bytes // PAGE_BYTES)
    slab_bytes = num_blocks * num_pages * (PAGE_BYTES + 8) + 16 * PAGE_BYTES  # a generation for each page, and the header
    (owned,) = create_slabs(slab_bytes, slab_bytes, Epoch(1))
    views = [owned.slab.view(number * num_pages, block_bytes) for number in range(num_blocks)]
    try:
        yield views
    finally:
        for view in views:
            view.release()
        owned.close()


def _gb_per_s(work: Callable[[], None], num_bytes: int) -> float:
    started_s = time.perf_counter()
    work()
    return num_bytes / (time.perf_counter() - started_s) / 1e9


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
