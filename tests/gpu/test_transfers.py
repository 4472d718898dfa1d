"""Blocks between the GPU's pool and a block store: the bytes are the same on both sides, whatever steps do meanwhile."""

import os
import queue
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from common.degraded import DegradedPaths
from common.ids import BlockId, BlockKey
from common.patience import Patience
from common.shm.checksum import checksum
from common.shm.slab import PAGE_BYTES, Slab, create_slab
from executor_svc.clients.kvstore import BlockStoreClient
from executor_svc.core.host_block import HostBlock
from executor_svc.cuda.blocks import CudaBlocks
from executor_svc.cuda.pinned_slabs import UNPINNED, PinnedSlabs
from executor_svc.cuda.registrar import CudaRegistrar
from executor_svc.cuda.stream import CudaStream
from executor_svc.kernels.layout import KEYS_AS_ROWS
from executor_svc.kvcache.cuda_pool import CudaKvPool
from executor_svc.transfer import Load, LoadDone, Save, SaveDone, TransferThread
from tests.integration.kvstore_svc.store_process import FINGERPRINT, MIB, StoreProcess
from tests.unit.executor_svc.filled import filled
from tests.unit.executor_svc.memory_store import MemoryStore

DEVICE = torch.device("cuda", 0)
NUM_BLOCKS = 40


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int


class Rig:
    """A pool, its steps' stream and its ways to host memory."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, group_blocks: int = 3, piece_bytes: int = MIB):
        self.pool = CudaKvPool([Shape(2, 16, 16)] * 3, NUM_BLOCKS, 16, dtype, KEYS_AS_ROWS, DEVICE)
        self.pool.check_integrity()
        self.steps = CudaStream(DEVICE)
        self.degraded = DegradedPaths()
        self.slabs = PinnedSlabs(CudaRegistrar(DEVICE), self.degraded, piece_bytes)
        self.blocks = CudaBlocks(
            self.pool,
            self.steps,
            CudaStream(DEVICE),
            self.slabs,
            num_threads=4,
            buffer_bytes=group_blocks * self.pool.block_bytes,
        )

    def fill_by_a_step(self) -> torch.Tensor:
        """Long work, then other bytes in all blocks, queued and not waited for; returns the bytes."""
        expected = torch.randint(0, 256, (NUM_BLOCKS, self.pool.block_bytes), dtype=torch.uint8, device=DEVICE)
        torch.cuda.synchronize(DEVICE)
        with self.steps.use():
            big = torch.ones(4096, 4096, device=DEVICE)
            for _ in range(20):
                big = big @ big * 1e-4
            self.pool.blocks.copy_(expected)
        return expected

    def close(self) -> None:
        self.slabs.check_integrity()
        self.blocks.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def make_slab(rig: Rig, num_places: int) -> Slab:
    owned = create_slab(0, num_places * rig.pool.block_bytes + 2 * PAGE_BYTES, epoch=1, nonce=2)
    owned.close()
    owned.slab.data[:] = os.urandom(len(owned.slab.data))
    return owned.slab


def places(rig: Rig, slab: Slab, numbers: Sequence[int]) -> list[HostBlock]:
    size = rig.pool.block_bytes
    views = [slab.view(n * size // PAGE_BYTES, size) for n in numbers]
    return [HostBlock(index, view, checksum(view)) for index, view in enumerate(views)]


def test_what_is_saved_is_loaded_into_other_blocks_in_several_groups(rig: Rig) -> None:
    store, outcomes = MemoryStore(), queue.Queue[LoadDone | SaveDone]()
    transfers = TransferThread(rig.blocks, store, lambda session, done: outcomes.put(done))
    transfers.start_session(1)
    keys = [BlockKey(bytes([i]) * 32) for i in range(20)]
    expected = rig.fill_by_a_step()
    transfers.submit(1, Save(1, [(key, BlockId(i)) for i, key in enumerate(keys)]))
    saved = outcomes.get(timeout=10)
    transfers.submit(1, Load(2, [(key, BlockId(39 - i)) for i, key in enumerate(keys)], Patience(5.0)))
    loaded = outcomes.get(timeout=10)
    with rig.steps.use():
        found = rig.pool.blocks[20:].flip(0).cpu()
    transfers.stop()

    assert isinstance(saved, SaveDone) and saved.num_written == 20
    assert isinstance(loaded, LoadDone) and loaded.num_loaded == 20 and loaded.num_by_tier == {"shm": 20}
    assert torch.equal(found, expected[:20].cpu())


def test_a_load_stops_at_the_first_block_that_is_not_there(rig: Rig) -> None:
    store, outcomes = MemoryStore(), queue.Queue[LoadDone | SaveDone]()
    transfers = TransferThread(rig.blocks, store, lambda session, done: outcomes.put(done))
    transfers.start_session(1)
    store.blocks[BlockKey(b"a" * 32)] = bytes(rig.pool.block_bytes)
    transfers.submit(1, Load(1, [(BlockKey(b"a" * 32), BlockId(0)), (BlockKey(b"b" * 32), BlockId(1))], Patience(5.0)))
    loaded = outcomes.get(timeout=10)
    transfers.stop()

    assert isinstance(loaded, LoadDone)
    assert (loaded.num_loaded, loaded.reason) == (1, "not there")


def test_a_slab_is_registered_and_the_gpu_reads_and_writes_it(rig: Rig) -> None:
    """Runs of neighbours, pieces that end within a block, blocks in no order, after a step that is still running."""
    slab = make_slab(rig, 30)
    rig.blocks.slabs_mapped([slab])
    assert rig.slabs.wait_idle(20)
    assert rig.slabs.num_pinned_bytes == len(slab.data), rig.degraded.counts
    expected = rig.fill_by_a_step()
    block_ids = [BlockId(n) for n in (3, 4, 5, 6, 20, 19, 18, 0)]
    lent = places(rig, slab, (0, 1, 2, 3, 9, 10, 11, 29))

    sums = rig.blocks.source(block_ids, rig.blocks.mark()).write_to(lent)
    rig.pool.blocks.zero_()
    torch.cuda.synchronize(DEVICE)
    stored = [HostBlock(block.index, block.data, written) for block, written in zip(lent, sums, strict=True)]
    verdicts = filled(rig.blocks.sink(block_ids, rig.blocks.mark()), stored)

    assert [bytes(block.data) for block in lent] == [expected[n].cpu().numpy().tobytes() for n in block_ids]
    assert verdicts == [True] * 8
    with rig.steps.use():
        assert torch.equal(rig.pool.blocks[block_ids], expected[block_ids])
        untouched = [n for n in range(NUM_BLOCKS) if n not in block_ids]
        assert not rig.pool.blocks[untouched].any()
    rig.blocks.slabs_unmapped([slab])
    assert rig.slabs.wait_idle(20)


def test_a_copy_may_end_a_piece_within_a_block() -> None:
    rig = Rig(piece_bytes=3 * PAGE_BYTES)
    slab = make_slab(rig, 12)
    rig.blocks.slabs_mapped([slab])
    assert rig.slabs.wait_idle(20)
    lent = places(rig, slab, range(12))

    assert filled(rig.blocks.sink([BlockId(n) for n in range(12)], rig.blocks.mark()), lent) == [True] * 12
    assert all(rig.pool.blocks[n].cpu().numpy().tobytes() == bytes(block.data) for n, block in enumerate(lent))
    assert rig.degraded.counts[UNPINNED] == 0
    rig.close()


def test_memory_that_is_registered_already_is_refused_and_staged(rig: Rig) -> None:
    """A refusal leaves no error behind that a later launch would find."""
    slab = make_slab(rig, 4)
    CudaRegistrar(DEVICE).register(torch.frombuffer(slab.data, dtype=torch.uint8).data_ptr(), len(slab.data))
    rig.blocks.slabs_mapped([slab])
    assert rig.slabs.wait_idle(20)
    lent = places(rig, slab, range(4))

    assert rig.degraded.counts[UNPINNED] == 1
    assert filled(rig.blocks.sink([BlockId(n) for n in range(4)], rig.blocks.mark()), lent) == [True] * 4
    assert torch.ones(8, device=DEVICE).sum().item() == 8
    CudaRegistrar(DEVICE).unregister(torch.frombuffer(slab.data, dtype=torch.uint8).data_ptr())


def test_blocks_go_to_a_real_store_and_come_back(rig: Rig, tmp_path: Path) -> None:
    outcomes: queue.Queue[LoadDone | SaveDone] = queue.Queue()
    flags = ("--capacity-bytes", str(16 * MIB), "--slab-bytes", str(8 * MIB))
    with closing(StoreProcess(tmp_path, *flags)) as store:
        client = BlockStoreClient(
            store.address,
            client_id="gpu",
            layout_fingerprint=FINGERPRINT,
            block_bytes=rig.pool.block_bytes,
            transport="shm",
            degraded=rig.degraded,
            slab_user=rig.blocks,
        )
        client.connect(10.0)
        assert rig.slabs.wait_idle(20)
        transfers = TransferThread(rig.blocks, client, lambda session, done: outcomes.put(done))
        transfers.start_session(1)
        expected = rig.fill_by_a_step()
        keys = [BlockKey(bytes([i]) * 32) for i in range(20)]
        transfers.submit(1, Save(1, [(key, BlockId(i)) for i, key in enumerate(keys)]))
        saved = outcomes.get(timeout=10)
        transfers.submit(1, Load(2, [(key, BlockId(20 + i)) for i, key in enumerate(keys)], Patience(5.0)))
        loaded = outcomes.get(timeout=10)
        transfers.stop()
        client.close()
        assert rig.slabs.wait_idle(20)

    assert isinstance(saved, SaveDone) and saved.num_written == 20, saved
    assert isinstance(loaded, LoadDone) and loaded.num_loaded == 20, loaded
    assert torch.equal(rig.pool.blocks[20:].cpu(), expected[:20].cpu())
    assert not rig.degraded.counts
