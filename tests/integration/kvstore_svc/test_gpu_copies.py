"""A real store and a GPU's way of copying, with a queue on the CPU in the GPU's place: leases, bad blocks, stores that die."""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from common.degraded import DegradedPaths
from common.ids import BlockId, BlockKey
from common.patience import Patience
from executor_svc.clients.kvstore import BlockStoreClient
from executor_svc.clients.kvstore_report import CORRUPT
from executor_svc.cuda.blocks import CudaBlocks
from executor_svc.cuda.pinned_slabs import UNPINNED, PinnedSlabs
from executor_svc.kernels.layout import KEYS_AS_ROWS
from executor_svc.kvcache.cuda_pool import CudaKvPool
from executor_svc.transfer import Load, LoadDone, Save, SaveDone, TransferThread
from tests.integration.kvstore_svc.store_process import FINGERPRINT, StoreProcess, key, wait_until
from tests.integration.kvstore_svc.test_transports import flip_a_bit
from tests.unit.executor_svc.cuda.fake_registrar import FakeRegistrar
from tests.unit.executor_svc.cuda.host_queue import CopyQueue, HostQueue
from tests.unit.executor_svc.kvcache.test_pool import LAYERS

NUM_BLOCKS = 40
SAVED = range(16)
LOADED = range(20, 36)


@dataclass
class Rig:
    """An executor's transfers."""

    store: StoreProcess
    refuses_from: int | None = None
    degraded: DegradedPaths = field(default_factory=DegradedPaths)

    def __post_init__(self) -> None:
        self.pool = CudaKvPool(LAYERS, NUM_BLOCKS, 4, torch.float32, KEYS_AS_ROWS, torch.device("cpu"))
        self.pool.blocks.random_(0, 256)
        self.expected = self.pool.blocks[: len(SAVED)].clone()
        self.copies, self.registrar = CopyQueue(), FakeRegistrar(self.refuses_from)
        self.slabs = PinnedSlabs(self.registrar, self.degraded)
        num_bytes = 4 * self.pool.block_bytes
        self.memory = CudaBlocks(self.pool, HostQueue(), self.copies, self.slabs, num_threads=2, buffer_bytes=num_bytes)
        self.client = BlockStoreClient(
            self.store.address,
            client_id="gpu",
            layout_fingerprint=FINGERPRINT,
            block_bytes=self.pool.block_bytes,
            transport="auto",
            degraded=self.degraded,
            slab_user=self.memory,
        )
        self.outcomes: queue.Queue[LoadDone | SaveDone] = queue.Queue()
        self.transfers = TransferThread(self.memory, self.client, lambda session, done: self.outcomes.put(done))
        self.transfers.start_session(1)
        self.client.connect(10.0)
        assert self.slabs.wait_idle(10)

    def save(self) -> SaveDone:
        self.transfers.submit(1, Save(1, [(key(i), BlockId(i)) for i in SAVED]))
        done = self.outcomes.get(timeout=20)
        assert isinstance(done, SaveDone), done
        return done

    def start_load(self, patience: Patience = Patience(10.0)) -> None:  # noqa: B008, a value
        blocks: list[tuple[BlockKey, BlockId]] = [(key(i), BlockId(b)) for i, b in zip(SAVED, LOADED, strict=True)]
        self.transfers.submit(1, Load(2, blocks, patience))

    def load(self) -> LoadDone:
        self.start_load()
        return self.loaded()

    def loaded(self) -> LoadDone:
        done = self.outcomes.get(timeout=20)
        assert isinstance(done, LoadDone)
        return done

    def has_right_bytes(self, done: LoadDone) -> bool:
        first = LOADED.start
        return torch.equal(self.pool.blocks[first : first + done.num_loaded], self.expected[: done.num_loaded])

    def num_leased(self) -> int:
        return self.store.stats().tiers[0].num_leased_blocks

    def close(self) -> None:
        self.copies.gate.set()
        self.transfers.stop()
        self.client.close()
        assert self.slabs.wait_idle(10)
        assert not self.registrar.ranges, "a slab was unmapped and is still registered"
        self.slabs.check_integrity()
        self.memory.close()


@pytest.fixture
def make(store: StoreProcess) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make_one(refuses_from: int | None = None) -> Rig:
        rigs.append(Rig(store, refuses_from))
        return rigs[-1]

    yield make_one
    for rig in rigs:
        rig.close()


def test_blocks_travel_between_the_stores_memory_and_the_pool_without_a_stop(make: Callable[..., Rig]) -> None:
    rig = make()

    saved, loaded = rig.save(), rig.load()

    assert saved == SaveDone(1, num_written=len(SAVED))
    assert (loaded.num_loaded, loaded.num_by_tier, loaded.reason) == (len(SAVED), {"shm": len(SAVED)}, "")
    assert rig.has_right_bytes(loaded)
    for source, target, num_bytes in rig.copies.copies:
        assert rig.registrar.covers(source, num_bytes) or rig.registrar.covers(target, num_bytes)
    assert len(rig.copies.copies) < len(SAVED), "neighbours travel together"
    wait_until(lambda: rig.num_leased() == 0)


def test_a_store_whose_memory_cannot_be_registered_serves_all_the_same(make: Callable[..., Rig]) -> None:
    rig = make(refuses_from=0)

    rig.save()
    loaded = rig.load()

    assert loaded.num_loaded == len(SAVED)
    assert rig.has_right_bytes(loaded)
    assert rig.degraded.counts[UNPINNED] > 0


def test_a_bad_block_in_the_middle_ends_the_chain_and_is_dropped(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.save()
    flip_a_bit(rig.store, 9, rig.pool.block_bytes)

    loaded = rig.load()

    assert (loaded.num_loaded, loaded.reason) == (9, CORRUPT)
    assert rig.has_right_bytes(loaded)
    wait_until(lambda: rig.num_leased() == 0)
    assert rig.store.stats().num_checksum_mismatches == 1
    assert rig.save().num_written == 1


def test_leases_end_after_the_copies_do(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.save()
    num_before = len(rig.copies.copies)
    rig.copies.gate.clear()
    rig.start_load()
    wait_until(lambda: len(rig.copies.copies) > num_before)

    assert rig.num_leased() == len(SAVED)
    rig.copies.gate.set()

    assert rig.has_right_bytes(rig.loaded())
    wait_until(lambda: rig.num_leased() == 0)


def test_a_load_whose_time_is_over_keeps_what_came_in_time(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.save()
    num_before = len(rig.copies.copies)
    rig.copies.gate.clear()
    rig.start_load(Patience(0.2))
    wait_until(lambda: len(rig.copies.copies) > num_before)
    threading.Timer(0.5, rig.copies.gate.set).start()

    loaded = rig.loaded()

    assert loaded.num_loaded < len(SAVED)
    assert rig.copies.num_done == len(rig.copies.copies)
    assert rig.has_right_bytes(loaded)
    wait_until(lambda: rig.num_leased() == 0)


def test_a_store_that_dies_during_the_copies_costs_nothing_that_was_lent(make: Callable[..., Rig]) -> None:
    """Its memory stays mapped; the next one's is registered in its place."""
    rig = make()
    rig.save()
    num_before = len(rig.copies.copies)
    rig.copies.gate.clear()
    rig.start_load()
    wait_until(lambda: len(rig.copies.copies) > num_before)
    old = set(rig.registrar.ranges)
    rig.store.kill()
    rig.copies.gate.set()

    loaded = rig.loaded()

    assert rig.has_right_bytes(loaded)
    rig.store.restart()
    rig.store.wait_ready()
    rig.store.reconnect()
    wait_until(lambda: rig.save().num_written == len(SAVED))
    assert rig.slabs.wait_idle(10)
    assert rig.registrar.ranges and len(rig.registrar.ranges) == len(old)
    assert rig.load().num_loaded == len(SAVED)
