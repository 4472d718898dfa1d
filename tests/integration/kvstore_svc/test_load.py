"""Clients at work while the store dies under them and runs out of room: a load gives the right bytes or none."""

import hashlib
import random
import threading
from contextlib import closing

import pytest

from common.degraded import DegradedPaths
from common.patience import Patience
from executor_svc.clients.kvstore_session import Transport
from tests.integration.kvstore_svc.store_process import StoreProcess, key, wait_until

BLOCK_BYTES = 40_000
NUM_KEYS = 200  # twice what fits
NUM_RESTARTS = 2


def bytes_of(number: int) -> bytes:
    return hashlib.shake_128(number.to_bytes(4, "big")).digest(BLOCK_BYTES)


class Worker(threading.Thread):
    """Saves and loads random runs of blocks until told to stop."""

    def __init__(self, store: StoreProcess, transport: Transport, seed: int):
        super().__init__()
        self.num_loaded = 0
        self.num_wrong = 0
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self._client = store.client(transport, block_bytes=BLOCK_BYTES, degraded=DegradedPaths())
        self._random = random.Random(seed)

    def run(self) -> None:
        try:
            with closing(self._client):
                while not self.stopping.is_set():
                    self._work()
        except BaseException as error:
            self.failure = error

    def _work(self) -> None:
        first = self._random.randrange(NUM_KEYS)
        numbers = range(first, first + self._random.randint(1, 8))
        if self._random.random() < 0.5:
            self._client.save([(key(n), memoryview(bytes_of(n))) for n in numbers])
            return
        into = [(key(n), memoryview(bytearray(BLOCK_BYTES))) for n in numbers]
        report = self._client.load(into, Patience(2.0))
        self.num_loaded += report.num_loaded
        for number, (_, data) in list(zip(numbers, into, strict=True))[: report.num_loaded]:
            self.num_wrong += bytes(data) != bytes_of(number)


def wait_for_loads(workers: list[Worker], num_blocks: int) -> None:
    """Until each worker has loaded as many blocks more, or has failed."""
    goals = [worker.num_loaded + num_blocks for worker in workers]
    wait_until(lambda: all(w.num_loaded >= goal or w.failure is not None for w, goal in zip(workers, goals, strict=True)))


@pytest.mark.slow
def test_clients_get_right_bytes_or_none_while_the_store_dies_and_returns(store: StoreProcess) -> None:
    transports: list[Transport] = ["shm", "shm", "inline"]
    workers = [Worker(store, transport, seed) for seed, transport in enumerate(transports)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(NUM_RESTARTS):
            wait_for_loads(workers, 20)
            store.kill()
            store.restart()
        store.wait_ready()
        wait_for_loads(workers, 1)
    finally:
        for worker in workers:
            worker.stopping.set()
        for worker in workers:
            worker.join()

    assert [worker.failure for worker in workers] == [None] * len(workers)
    assert sum(worker.num_wrong for worker in workers) == 0
    wait_until(lambda: not [s for s in store.stats().sessions if s.client_id == "test-shm"])
    wait_until(lambda: store.stats().tiers[0].num_leased_blocks == 0)
    tier = store.stats().tiers[0]
    assert tier.used_bytes == tier.num_blocks * 10 * 4096
