"""Blocks of a GPU's pool and host memory that is registered, or not: what is copied, how, and when it is said to be over."""

import gc
import os
import queue
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.degraded import DegradedPaths
from common.ids import BlockId
from common.shm.checksum import checksum
from common.shm.slab import PAGE_BYTES, Slab, create_slab
from executor_svc.core.host_block import HostBlock
from executor_svc.cuda.blocks import CudaBlocks
from executor_svc.cuda.pinned_slabs import UNPINNED, PinnedSlabs
from executor_svc.kernels.layout import KEYS_AS_ROWS
from executor_svc.kvcache.cuda_pool import CudaKvPool
from tests.unit.executor_svc.cuda.fake_registrar import FakeRegistrar
from tests.unit.executor_svc.cuda.host_queue import CopyQueue, HostQueue
from tests.unit.executor_svc.filled import filled
from tests.unit.executor_svc.kvcache.test_pool import LAYERS

NUM_BLOCKS = 24
NUM_PLACES = 20


@dataclass
class Rig:
    """A pool, a slab with places for blocks, and everything between them."""

    pool: CudaKvPool
    slab: Slab
    copies: CopyQueue
    registrar: FakeRegistrar
    slabs: PinnedSlabs
    blocks: CudaBlocks
    degraded: DegradedPaths

    def place(self, number: int) -> memoryview:
        return self.slab.view(number * self.pool.block_bytes // PAGE_BYTES, self.pool.block_bytes)

    def stored(self, *numbers: int) -> list[HostBlock]:
        return [HostBlock(index, self.place(n), checksum(self.place(n))) for index, n in enumerate(numbers)]

    def pin(self) -> None:
        self.blocks.slabs_mapped([self.slab])
        assert self.slabs.wait_idle(10)

    def holds(self, block_id: int, data: memoryview) -> bool:
        return self.pool.blocks[block_id].numpy().tobytes() == bytes(data)


def make_rig(piece_blocks: float = 100, group_blocks: int = 4, refuses_from: int | None = None) -> Rig:
    pool = CudaKvPool(LAYERS, NUM_BLOCKS, 4, torch.float32, KEYS_AS_ROWS, torch.device("cpu"))
    pages = pool.block_bytes // PAGE_BYTES
    owned = create_slab(0, (NUM_PLACES * pages + 2) * PAGE_BYTES, epoch=1, nonce=2)
    owned.close()
    owned.slab.data[:] = os.urandom(len(owned.slab.data))
    copies, registrar, degraded = CopyQueue(), FakeRegistrar(refuses_from), DegradedPaths()
    slabs = PinnedSlabs(registrar, degraded, max(1, int(piece_blocks * pages)) * PAGE_BYTES)
    blocks = CudaBlocks(pool, HostQueue(), copies, slabs, num_threads=3, buffer_bytes=group_blocks * pool.block_bytes)
    return Rig(pool, owned.slab, copies, registrar, slabs, blocks, degraded)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = make_rig()
    yield rig
    rig.copies.failure = None
    rig.copies.gate.set()
    rig.slabs.check_integrity()
    rig.blocks.close()


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(n) for n in numbers]


# Loads


def test_neighbours_go_from_a_registered_slab_to_the_pool_in_one_copy(rig: Rig) -> None:
    rig.pin()
    mark = rig.blocks.mark()

    verdicts = filled(rig.blocks.sink(ids(4, 5, 6, 9), mark), rig.stored(1, 2, 3, 4))

    assert verdicts == [True] * 4
    assert [num_bytes // rig.pool.block_bytes for _, _, num_bytes in rig.copies.copies] == [3, 1]
    assert all(rig.registrar.covers(source, num_bytes) for source, _, num_bytes in rig.copies.copies)
    assert all(rig.holds(block_id, rig.place(n)) for block_id, n in ((4, 1), (5, 2), (6, 3), (9, 4)))
    assert rig.copies.waits == [mark]


def test_until_a_slab_is_registered_its_blocks_are_staged(rig: Rig) -> None:
    rig.registrar.gate.clear()
    rig.blocks.slabs_mapped([rig.slab])
    assert rig.registrar.entered.wait(10)

    assert filled(rig.blocks.sink(ids(0, 1), None), rig.stored(0, 1)) == [True, True]
    assert not any(rig.registrar.covers(source, 1) for source, _, _ in rig.copies.copies)

    rig.registrar.gate.set()
    assert rig.slabs.wait_idle(10)
    first = len(rig.copies.copies)
    assert filled(rig.blocks.sink(ids(2), None), rig.stored(2)) == [True]
    assert all(rig.registrar.covers(source, num_bytes) for source, _, num_bytes in rig.copies.copies[first:])
    assert all(rig.holds(n, rig.place(n)) for n in range(3))
    assert rig.degraded.counts[UNPINNED] == 0


def test_a_slab_that_cannot_be_registered_is_said_once_and_its_blocks_are_staged() -> None:
    """Here from the third piece on."""
    rig = make_rig(piece_blocks=3, refuses_from=2)
    rig.pin()

    assert filled(rig.blocks.sink(ids(*range(12)), None), rig.stored(*range(12))) == [True] * 12

    assert all(rig.holds(n, rig.place(n)) for n in range(12))
    assert rig.degraded.counts[UNPINNED] == 1
    assert rig.slabs.num_pinned_bytes == 6 * rig.pool.block_bytes
    rig.slabs.check_integrity()
    rig.blocks.close()


def test_no_copy_crosses_from_one_registration_to_the_next() -> None:
    rig = make_rig(piece_blocks=1.5)
    rig.pin()

    assert filled(rig.blocks.sink(ids(*range(9)), None), rig.stored(*range(9))) == [True] * 9

    assert all(rig.registrar.covers(source, num_bytes) for source, _, num_bytes in rig.copies.copies)
    assert all(rig.holds(n, rig.place(n)) for n in range(9))
    rig.blocks.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_a_block_with_wrong_bytes_is_found_in_its_place_of_the_chain(rig: Rig, pinned: bool) -> None:
    if pinned:
        rig.pin()
    stored = rig.stored(*range(10))
    rig.place(6)[-1] ^= 1

    assert filled(rig.blocks.sink(ids(*range(10)), None), stored) == [True] * 6 + [False] + [True] * 3


@pytest.mark.parametrize("pinned", [True, False])
def test_a_verdict_comes_after_the_copy_and_lent_memory_is_not_read_after_the_end(rig: Rig, pinned: bool) -> None:
    if pinned:
        rig.pin()
    stored = rig.stored(*range(18))
    expected = [bytes(block.data) for block in stored]
    rig.copies.gate.clear()
    verdicts: queue.Queue[bool] = queue.Queue()
    ended = threading.Event()

    def load() -> None:
        with closing(rig.blocks.sink(ids(*range(18)), None).begin()) as filling:
            filling.add(stored)
            assert filling.is_full
            verdicts.put(filling.verdicts()[0])
        ended.set()

    thread = threading.Thread(target=load)
    thread.start()
    with pytest.raises(queue.Empty):
        verdicts.get(timeout=0.05)
    rig.copies.gate.set()
    assert verdicts.get(timeout=10)
    assert ended.wait(10)
    thread.join()

    assert rig.copies.num_done == len(rig.copies.copies) > 0, "the load was broken off, and copies are still under way"
    rig.slab.data[:] = bytes(len(rig.slab.data))  # the store gives the places to others
    rig.copies.check()
    assert rig.pool.blocks[0].numpy().tobytes() == expected[0]


def test_a_device_that_fails_ends_the_load_and_holds_nothing(rig: Rig) -> None:
    rig.pin()
    rig.copies.failure = RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        filled(rig.blocks.sink(ids(0, 1), None), rig.stored(0, 1))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        rig.blocks.source(ids(0, 1), None).write_to([HostBlock(0, rig.place(0)), HostBlock(1, rig.place(1))])

    rig.slabs.check_integrity()


# Saves


@pytest.mark.parametrize("pinned", [True, False])
def test_saved_blocks_are_in_their_places_with_their_checksums(rig: Rig, pinned: bool) -> None:
    if pinned:
        rig.pin()
    rig.pool.blocks.random_(0, 256)
    places = [HostBlock(index, rig.place(number)) for index, number in enumerate((7, 8, 9, 3, 2, 11))]
    mark = rig.blocks.mark()

    sums = rig.blocks.source(ids(1, 2, 3, 4, 5, 6), mark).write_to(places)

    assert all(rig.holds(block_id, place.data) for block_id, place in zip(range(1, 7), places, strict=True))
    assert sums == [checksum(place.data) for place in places]
    assert rig.copies.waits == [mark]
    if pinned:
        assert all(rig.registrar.covers(target, num_bytes) for _, target, num_bytes in rig.copies.copies)
        assert rig.copies.copies[0][2] == 3 * rig.pool.block_bytes


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(0, NUM_PLACES),
    piece_blocks=st.sampled_from([0.4, 1.5, 4, 100]),
    refuses_from=st.sampled_from([None, 0, 1, 3]),
    shuffled=st.booleans(),
)
def test_whatever_is_registered_the_bytes_are_the_same(
    seed: int, count: int, piece_blocks: float, refuses_from: int | None, shuffled: bool
) -> None:
    rig = make_rig(piece_blocks, group_blocks=3, refuses_from=refuses_from)
    rig.pin()
    chance = random.Random(seed)
    places, block_ids = list(range(NUM_PLACES)), list(range(NUM_BLOCKS))
    if shuffled:
        chance.shuffle(places)
        chance.shuffle(block_ids)
    numbers: Sequence[int] = places[:count]

    assert filled(rig.blocks.sink(ids(*block_ids[:count]), None), rig.stored(*numbers)) == [True] * count
    expected = [bytes(rig.place(n)) for n in numbers]
    rig.slab.data[:] = bytes(len(rig.slab.data))
    lent = [HostBlock(index, rig.place(n)) for index, n in enumerate(numbers)]
    sums = rig.blocks.source(ids(*block_ids[:count]), None).write_to(lent)

    assert [bytes(block.data) for block in lent] == expected
    assert sums == [checksum(data) for data in expected]
    rig.slabs.check_integrity()
    rig.blocks.close()


# Slabs that go


def num_mapped_slabs() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("octavo-slab")


def let_go_during_a_copy() -> FakeRegistrar:
    rig = make_rig()
    rig.pin()
    stored = rig.stored(*range(3))
    rig.copies.gate.clear()
    thread = threading.Thread(target=lambda: filled(rig.blocks.sink(ids(0, 1, 2), None), stored))
    thread.start()
    while not rig.copies.copies:
        thread.join(0.001)

    rig.blocks.slabs_unmapped([rig.slab])
    assert not rig.slabs.wait_idle(0.05), "a copy reads it"
    assert rig.registrar.ranges
    rig.copies.gate.set()
    thread.join()
    assert rig.slabs.wait_idle(10)
    rig.blocks.slabs_unmapped([rig.slab])  # twice is once
    rig.blocks.close()
    return rig.registrar


def test_a_slab_is_unregistered_after_the_copy_that_uses_it_and_then_unmapped() -> None:
    num_before = num_mapped_slabs()

    assert not let_go_during_a_copy().ranges
    assert num_mapped_slabs() == num_before


def test_a_slab_that_goes_while_it_is_registered_is_let_go_of_soon() -> None:
    rig = make_rig(piece_blocks=1)
    rig.registrar.gate.clear()
    rig.blocks.slabs_mapped([rig.slab])
    assert rig.registrar.entered.wait(10)
    rig.blocks.slabs_unmapped([rig.slab])
    rig.registrar.gate.set()

    assert rig.slabs.wait_idle(10)
    assert (rig.registrar.ranges, rig.registrar.num_calls) == ({}, 1)
    rig.blocks.close()
