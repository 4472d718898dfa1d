"""Blocks between the GPU's pool and a block store: the bytes are the same on both sides, whatever steps do meanwhile."""

import queue
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from common.ids import BlockId, BlockKey
from common.patience import Patience
from executor_svc.clients.kvstore import LoadReport, SaveReport
from executor_svc.cuda.staging import StagedBlocks
from executor_svc.cuda.stream import CudaStream
from executor_svc.kernels.layout import KEYS_AS_ROWS
from executor_svc.kvcache.cuda_pool import CudaKvPool
from executor_svc.transfer import Load, LoadDone, Save, SaveDone, TransferThread

DEVICE = torch.device("cuda", 0)
NUM_BLOCKS = 40


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int


class MemoryStore:
    """A block store in a dictionary."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, bytes] = {}

    @property
    def transport(self) -> tuple[str, str]:
        return "shm", ""

    def save(self, blocks: Sequence[tuple[BlockKey, memoryview]]) -> SaveReport:
        for key, data in blocks:
            self.blocks[key] = bytes(data)
        return SaveReport(num_written=len(blocks))

    def look_after(self) -> None:
        pass

    def load(self, blocks: Sequence[tuple[BlockKey, memoryview]], patience: Patience) -> LoadReport:
        num_loaded = 0
        for key, data in blocks:
            if key not in self.blocks:
                return LoadReport(num_loaded, {"shm": num_loaded}, "not there", 0.0)
            data[:] = self.blocks[key]
            num_loaded += 1
        return LoadReport(num_loaded, {"shm": num_loaded}, "", 0.0)


def test_what_is_saved_is_loaded_into_other_blocks_in_several_groups() -> None:
    pool = CudaKvPool([Shape(2, 16, 16)] * 3, NUM_BLOCKS, 16, torch.bfloat16, KEYS_AS_ROWS, DEVICE)
    pool.check_integrity()
    stream = CudaStream(DEVICE)
    store, outcomes = MemoryStore(), queue.Queue[LoadDone | SaveDone]()
    transfers = TransferThread(StagedBlocks(pool, stream, 3 * pool.block_bytes), store, lambda session, done: outcomes.put(done))
    transfers.start_session(1)
    keys = [BlockKey(bytes([i]) * 32) for i in range(20)]
    with stream.use():
        pool.blocks[:20] = torch.randint(0, 255, (20, pool.block_bytes), dtype=torch.uint8, device=DEVICE)
        expected = pool.blocks[:20].cpu()
        transfers.submit(1, Save(1, [(key, BlockId(i)) for i, key in enumerate(keys)]))
        saved = outcomes.get(timeout=10)
        transfers.submit(1, Load(2, [(key, BlockId(39 - i)) for i, key in enumerate(keys)], Patience(5.0)))
        loaded = outcomes.get(timeout=10)
        found = pool.blocks[20:].flip(0).cpu()
    transfers.stop()

    assert isinstance(saved, SaveDone) and saved.num_written == 20
    assert isinstance(loaded, LoadDone) and loaded.num_loaded == 20 and loaded.num_by_tier == {"shm": 20}
    assert torch.equal(found, expected)


def test_a_load_stops_at_the_first_block_that_is_not_there() -> None:
    pool = CudaKvPool([Shape(2, 16, 16)], NUM_BLOCKS, 16, torch.float16, KEYS_AS_ROWS, DEVICE)
    store, outcomes = MemoryStore(), queue.Queue[LoadDone | SaveDone]()
    transfers = TransferThread(StagedBlocks(pool, CudaStream(DEVICE)), store, lambda session, done: outcomes.put(done))
    transfers.start_session(1)
    store.blocks[BlockKey(b"a" * 32)] = bytes(pool.block_bytes)
    transfers.submit(1, Load(1, [(BlockKey(b"a" * 32), BlockId(0)), (BlockKey(b"b" * 32), BlockId(1))], Patience(5.0)))
    loaded = outcomes.get(timeout=10)
    transfers.stop()

    assert isinstance(loaded, LoadDone)
    assert (loaded.num_loaded, loaded.reason) == (1, "not there")
