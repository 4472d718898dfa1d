"""Blocks in a smaller form in a real store: from every tier and after a restart they come back as what the form keeps of them.

A GPU makes the forms; here plain torch does, in its place, with the same calls.
"""

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from common.degraded import DegradedPaths
from common.ids import BlockId
from common.patience import Patience
from executor_svc.clients.kvstore import BlockStoreClient
from executor_svc.cuda.blocks import CudaBlocks
from executor_svc.cuda.pinned_slabs import PinnedSlabs
from executor_svc.cuda.stored_blocks import StoredBlocks, StoredSlots
from executor_svc.kernels.layout import KEYS_AS_ROWS
from executor_svc.kvcache.cuda_pool import CudaKvPool
from executor_svc.kvcache.stored_form import FORMS, compress, restore, stored_layout
from executor_svc.transfer import Load, LoadDone, Save, SaveDone, TransferThread
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from tests.integration.kvstore_svc.store_process import FINGERPRINT, MIB, StoreProcess, key, wait_until
from tests.unit.executor_svc.cuda.fake_registrar import FakeRegistrar
from tests.unit.executor_svc.cuda.host_queue import HostQueue
from tests.unit.executor_svc.cuda.test_stored_blocks import OrderedCopies, PlainForm
from tests.unit.executor_svc.kvcache.test_pool import LAYERS

NUM_BLOCKS, NUM_SLOTS = 24, 5
SAVED = range(10)
LAYOUT = stored_layout(LAYERS, 4, torch.float32)


class Executor:
    """A pool, and transfers between it and a store in a form."""

    def __init__(self, store: StoreProcess, form: str):
        self.pool = CudaKvPool(LAYERS, NUM_BLOCKS, 4, torch.float32, KEYS_AS_ROWS, torch.device("cpu"))
        slots = StoredSlots(NUM_SLOTS, LAYOUT.stored_bytes, torch.device("cpu"))
        copies, slabs = OrderedCopies(), PinnedSlabs(FakeRegistrar(), DegradedPaths())
        memory = CudaBlocks(slots, HostQueue(), copies, slabs, num_threads=2, buffer_bytes=2 * slots.block_bytes)
        self.blocks = StoredBlocks(self.pool, slots, memory, copies, PlainForm(FORMS[form], LAYOUT))
        self.client = BlockStoreClient(
            store.address,
            client_id="gpu",
            layout_fingerprint=FINGERPRINT,
            block_bytes=self.blocks.block_bytes,
            transport="auto",
            degraded=DegradedPaths(),
            slab_user=self.blocks,
        )
        self._outcomes: queue.Queue[LoadDone | SaveDone] = queue.Queue()
        self._transfers = TransferThread(self.blocks, self.client, lambda session, done: self._outcomes.put(done))
        self._transfers.start_session(1)

    def save(self, block_ids: Sequence[int]) -> SaveDone:
        self._transfers.submit(1, Save(1, [(key(i), BlockId(i)) for i in block_ids]))
        done = self._outcomes.get(timeout=20)
        assert isinstance(done, SaveDone)
        return done

    def load(self, block_ids: Sequence[int]) -> LoadDone:
        self._transfers.submit(1, Load(2, [(key(i), BlockId(b)) for i, b in zip(SAVED, block_ids, strict=True)], Patience(10.0)))
        done = self._outcomes.get(timeout=20)
        assert isinstance(done, LoadDone)
        return done

    def close(self) -> None:
        self._transfers.stop()
        self.client.close()
        self.blocks.close()


@contextmanager
def executor(store: StoreProcess, form: str) -> Iterator[Executor]:
    made = Executor(store, form)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("form", sorted(FORMS))
def test_what_a_form_keeps_comes_back_from_memory_and_from_disk(start_store: Callable[..., StoreProcess], form: str) -> None:
    store = start_store("--disk-capacity-bytes", str(16 * MIB), "--disk-admission-touches", "1")
    with executor(store, form) as first:
        for cache in first.pool.layer_caches:
            for part in (cache.key, cache.value):
                part.copy_(torch.randn(part.shape))
        kept = restore(compress(first.pool.blocks[: len(SAVED)], FORMS[form], LAYOUT), FORMS[form], LAYOUT)

        assert first.save(SAVED).num_written == len(SAVED)
        loaded = first.load(range(12, 12 + len(SAVED)))
        assert loaded.num_by_tier == {"shm": len(SAVED)}
        assert torch.equal(first.pool.blocks[12 : 12 + len(SAVED)], kept)
        tier = store.stats().tiers[0]
        assert tier.used_bytes == len(SAVED) * LAYOUT.stored_bytes < len(SAVED) * first.pool.block_bytes
        wait_until(lambda: any(t.tier == pb.TIER_DISK and t.num_blocks == len(SAVED) for t in store.stats().tiers))

    assert store.stop() == 0
    store.restart()
    store.wait_ready()
    with executor(store, form) as second:
        assert second.load(range(len(SAVED))).num_by_tier == {"disk": len(SAVED)}
        assert torch.equal(second.pool.blocks[: len(SAVED)], kept)
