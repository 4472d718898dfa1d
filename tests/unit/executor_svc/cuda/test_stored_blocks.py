"""Blocks that travel in a smaller form: what is stored, what comes back, and that slots are never read too early or too late."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from common.degraded import DegradedPaths
from common.ids import BlockId
from common.shm.checksum import checksum
from executor_svc.core.host_block import HostBlock
from executor_svc.cuda.blocks import CudaBlocks
from executor_svc.cuda.pinned_slabs import PinnedSlabs
from executor_svc.cuda.stored_blocks import StoredBlocks, StoredSlots
from executor_svc.kernels.layout import KEYS_AS_ROWS
from executor_svc.kvcache.cuda_pool import CudaKvPool
from executor_svc.kvcache.stored_form import FORMS, StoredForm, StoredLayout, compress, restore, stored_layout
from tests.unit.executor_svc.cuda.fake_registrar import FakeRegistrar
from tests.unit.executor_svc.cuda.host_queue import CopyQueue, HostQueue
from tests.unit.executor_svc.kvcache.test_pool import LAYERS

NUM_BLOCKS, NUM_SLOTS = 24, 5


class OrderedCopies(CopyQueue):
    """A stream that is never behind: copies and kernels take effect in their order."""

    def _queue(self, source: Tensor, target: Tensor) -> None:
        super()._queue(source, target)
        self.run(len(self.copies))


@dataclass(frozen=True)
class PlainForm:
    """A BlockForm in plain torch."""

    form: StoredForm
    layout: StoredLayout

    def compress(self, blocks: Tensor, block_ids: Tensor, stored: Tensor) -> None:
        stored[: len(block_ids)] = compress(blocks[block_ids], self.form, self.layout)

    def restore(self, stored: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
        blocks[block_ids] = restore(stored, self.form, self.layout)


@dataclass(frozen=True)
class Rig:
    pool: CudaKvPool
    form: PlainForm
    blocks: StoredBlocks

    def stored(self, *block_ids: int) -> list[bytes]:
        return [row.numpy().tobytes() for row in compress(self.pool.blocks[list(block_ids)], self.form.form, self.form.layout)]


@pytest.fixture(params=sorted(FORMS))
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    pool = CudaKvPool(LAYERS, NUM_BLOCKS, 4, torch.float32, KEYS_AS_ROWS, torch.device("cpu"))
    for cache in pool.layer_caches:
        for part in (cache.key, cache.value):
            part.copy_(torch.randn(part.shape))
    layout = stored_layout(LAYERS, 4, torch.float32)
    slots, copies = StoredSlots(NUM_SLOTS, layout.stored_bytes, torch.device("cpu")), OrderedCopies()
    slabs = PinnedSlabs(FakeRegistrar(), DegradedPaths())
    memory = CudaBlocks(slots, HostQueue(), copies, slabs, num_threads=2, buffer_bytes=2 * slots.block_bytes)
    form = PlainForm(FORMS[request.param], layout)
    yield Rig(pool, form, blocks := StoredBlocks(pool, slots, memory, copies, form))
    blocks.close()


def ids(numbers: list[int]) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def save(rig: Rig, numbers: list[int]) -> list[bytearray]:
    places = [bytearray(rig.blocks.block_bytes) for _ in numbers]
    source = rig.blocks.source(ids(numbers), rig.blocks.mark())
    sums = source.write_to([HostBlock(index, memoryview(place)) for index, place in enumerate(places)])
    assert sums == [checksum(memoryview(place)) for place in places]
    return places


def test_what_is_stored_is_the_small_form(rig: Rig) -> None:
    numbers = random.sample(range(NUM_BLOCKS), 13)

    assert [bytes(place) for place in save(rig, numbers)] == rig.stored(*numbers)
    assert rig.blocks.block_bytes < rig.pool.block_bytes


def test_a_part_of_a_save_may_be_asked_for(rig: Rig) -> None:
    place = bytearray(rig.blocks.block_bytes)
    rig.blocks.source(ids([4, 7, 9]), rig.blocks.mark()).write_to([HostBlock(1, memoryview(place))])

    assert bytes(place) == rig.stored(7)[0]


@pytest.mark.parametrize("group", [1, 3, 5, 12, 17])
def test_what_comes_back_is_what_was_stored(rig: Rig, group: int) -> None:
    numbers = random.sample(range(NUM_BLOCKS), 17)
    places = save(rig, numbers)
    rows = torch.stack([torch.frombuffer(place, dtype=torch.uint8) for place in places])
    wanted = restore(rows, rig.form.form, rig.form.layout)
    others = [number for number in range(NUM_BLOCKS) if number not in numbers]
    before = rig.pool.blocks[others].clone()
    rig.pool.blocks[numbers] = 0xEE
    told = 0
    stored = [HostBlock(index, memoryview(place), checksum(memoryview(place))) for index, place in enumerate(places)]
    with closing(rig.blocks.sink(ids(numbers), rig.blocks.mark()).begin()) as filling:
        for start in range(0, len(stored), group):
            filling.add(stored[start : start + group])
            while filling.is_full:
                told += sum(filling.verdicts())
        while filling.is_under_way:
            told += sum(filling.verdicts())

    assert told == len(numbers)
    assert torch.equal(rig.pool.blocks[numbers], wanted)
    assert torch.equal(rig.pool.blocks[others], before)


def test_a_block_with_wrong_bytes_is_found_in_its_place(rig: Rig) -> None:
    places = save(rig, list(range(8)))
    stored = [HostBlock(index, memoryview(place), checksum(memoryview(place))) for index, place in enumerate(places)]
    places[6][100] ^= 1
    verdicts: list[bool] = []
    with closing(rig.blocks.sink(ids(list(range(8))), rig.blocks.mark()).begin()) as filling:
        filling.add(stored)
        while filling.is_under_way:
            verdicts += filling.verdicts()

    assert verdicts == [True] * 6 + [False, True]
