"""Blocks in their stored form on a GPU: bytes are those of plain torch, and come back through real streams."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from common.degraded import DegradedPaths
from common.ids import BlockId
from common.shm.checksum import checksum
from executor_svc.core.host_block import HostBlock
from executor_svc.cuda.blocks import CudaBlocks
from executor_svc.cuda.pinned_slabs import PinnedSlabs
from executor_svc.cuda.registrar import CudaRegistrar
from executor_svc.cuda.stored_blocks import StoredBlocks, StoredSlots
from executor_svc.cuda.stream import CudaStream
from executor_svc.kernels.layout import KEYS_AS_ROWS
from executor_svc.kernels.triton.stored_form import StoredFormKernels
from executor_svc.kvcache.cuda_pool import CudaKvPool
from executor_svc.kvcache.stored_form import FORMS, StoredForm, compress, restore, stored_layout
from tests.unit.executor_svc.kvcache.test_pool import Shape

DEVICE = torch.device("cuda", 0)
LAYERS = [Shape(8, 128, 128), Shape(3, 64, 64), Shape(1, 16, 12)]
NUM_BLOCKS, NUM_SLOTS = 96, 20


def make_pool(dtype: torch.dtype) -> CudaKvPool:
    pool = CudaKvPool(LAYERS, NUM_BLOCKS, 16, dtype, KEYS_AS_ROWS, DEVICE)
    for number, cache in enumerate(pool.layer_caches):
        for part in (cache.key, cache.value):
            part.copy_(torch.randn(part.shape, device=DEVICE) * 10.0**number)
    return pool


@contextmanager
def stored_blocks(pool: CudaKvPool, form: StoredForm) -> Iterator[StoredBlocks]:
    layout = stored_layout(LAYERS, 16, pool.dtype)
    slots = StoredSlots(NUM_SLOTS, layout.stored_bytes, DEVICE)
    kernels = StoredFormKernels(form, layout, DEVICE)
    kernels.compile(torch.zeros_like(pool.blocks), slots.blocks)
    steps, copies = CudaStream(DEVICE), CudaStream(DEVICE)
    slabs = PinnedSlabs(CudaRegistrar(DEVICE), DegradedPaths())
    with closing(CudaBlocks(slots, steps, copies, slabs, num_threads=2, buffer_bytes=8 * layout.stored_bytes)) as memory:
        yield StoredBlocks(pool, slots, memory, copies, kernels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_blocks_go_down_small_and_come_back(form: StoredForm, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pool, layout = make_pool(dtype), stored_layout(LAYERS, 16, dtype)
    numbers = torch.randperm(NUM_BLOCKS)[:70].tolist()
    small = compress(pool.blocks[numbers], form, layout)
    before = pool.blocks.clone()
    with stored_blocks(pool, form) as blocks:
        block_ids = [BlockId(number) for number in numbers]
        places = [bytearray(layout.stored_bytes) for _ in numbers]
        source = blocks.source(block_ids, blocks.mark())
        sums = source.write_to([HostBlock(index, memoryview(place)) for index, place in enumerate(places)])
        found = torch.stack([torch.frombuffer(place, dtype=torch.uint8) for place in places])
        for head in layout.heads:
            for start, size in ((head.rows_start, head.num_values), (head.scale_start, 4)):
                assert torch.equal(found[:, start : start + size], small[:, start : start + size].cpu())
        assert sums == [checksum(memoryview(place)) for place in places]

        pool.blocks[numbers] = 0xEE
        torch.cuda.synchronize()
        stored = [HostBlock(index, memoryview(place), sums[index]) for index, place in enumerate(places)]
        verdicts: list[bool] = []
        with closing(blocks.sink(block_ids, blocks.mark()).begin()) as filling:
            for start in range(0, len(stored), 32):
                filling.add(stored[start : start + 32])
                while filling.is_full:
                    verdicts += filling.verdicts()
            while filling.is_under_way:
                verdicts += filling.verdicts()
    wanted = restore(small, form, layout)
    assert verdicts == [True] * len(numbers)
    for head in layout.heads:
        part = slice(head.native_start, head.native_start + head.num_values * dtype.itemsize)
        assert torch.equal(pool.blocks[numbers][:, part], wanted[:, part])
    others = [number for number in range(NUM_BLOCKS) if number not in numbers]
    assert torch.equal(pool.blocks[others], before[others])
