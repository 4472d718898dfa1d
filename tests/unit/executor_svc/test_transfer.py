"""Transfers beside the steps: what they report, their order, and sessions that end in the middle of a copy."""

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from common.ids import BlockId, BlockKey
from common.patience import Patience
from executor_svc.clients.kvstore_report import OUT_OF_TIME
from executor_svc.kvcache.pool import KvPool
from executor_svc.transfer import Drained, Load, LoadDone, Save, SaveDone, TransferThread
from tests.unit.executor_svc.kvcache.test_pool import LAYERS
from tests.unit.executor_svc.memory_store import MemoryStore

KEYS = [BlockKey(bytes([i]) * 32) for i in range(4)]


@dataclass
class Rig:
    pool: KvPool
    store: MemoryStore
    transfers: TransferThread
    outcomes: "queue.Queue[tuple[int, LoadDone | SaveDone]]"


@pytest.fixture
def rig() -> Iterator[Rig]:
    pool, store = KvPool(LAYERS, 8, 4, torch.float32), MemoryStore()
    outcomes: queue.Queue[tuple[int, LoadDone | SaveDone]] = queue.Queue()
    transfers = TransferThread(pool, store, lambda session, done: outcomes.put((session, done)))
    transfers.start_session(1)
    yield Rig(pool, store, transfers, outcomes)
    store.gate.set()
    transfers.stop()


def blocks(*block_ids: int) -> list[tuple[BlockKey, BlockId]]:
    return [(KEYS[position], BlockId(block_id)) for position, block_id in enumerate(block_ids)]


def test_what_is_saved_is_loaded_into_other_blocks(rig: Rig) -> None:
    rig.pool.layer_caches[0].key[2] = 7.0
    rig.transfers.submit(1, Save(5, blocks(2, 3)))
    assert rig.outcomes.get(timeout=5) == (1, SaveDone(5, num_written=2))
    rig.pool.zero()
    rig.transfers.submit(1, Load(6, blocks(0, 1, 4), Patience(1.0)))

    session, done = rig.outcomes.get(timeout=5)

    assert isinstance(done, LoadDone)
    assert (session, done.load_id, done.num_loaded, done.num_by_tier, done.reason) == (1, 6, 2, {"shm": 2}, "not there")
    assert (rig.pool.layer_caches[0].key[0] == 7.0).all()
    assert not rig.pool.layer_caches[0].key[2].any()


def test_loads_overtake_saves_that_wait(rig: Rig) -> None:
    rig.store.gate.clear()
    rig.transfers.submit(1, Save(1, blocks(0)))
    rig.store.started.wait(5)
    rig.transfers.submit(1, Save(2, blocks(1)))
    rig.transfers.submit(1, Load(3, blocks(2), Patience(1.0)))
    rig.store.gate.set()
    for _ in range(3):
        rig.outcomes.get(timeout=5)

    assert rig.store.calls == ["save", "load", "save"]


def test_a_new_session_waits_for_the_running_copy_and_forgets_the_waiting_ones(rig: Rig) -> None:
    """No copy of an older session touches a block of the new one."""
    rig.store.gate.clear()
    rig.transfers.submit(1, Load(1, blocks(0), Patience(1.0)))
    rig.store.started.wait(5)
    rig.transfers.submit(1, Load(2, blocks(1), Patience(1.0)))
    opened = threading.Event()

    def open_session() -> None:
        rig.transfers.start_session(2)
        opened.set()

    thread = threading.Thread(target=open_session)
    thread.start()
    assert not opened.wait(0.05), "the copy of session 1 still runs"
    rig.store.gate.set()
    thread.join(5)
    rig.transfers.submit(2, Save(3, blocks(3)))

    assert [rig.outcomes.get(timeout=5)[0] for _ in range(2)] == [1, 2]
    assert rig.store.calls == ["load", "save"]


def test_without_a_store_everything_is_a_miss() -> None:
    outcomes: queue.Queue[LoadDone | SaveDone] = queue.Queue()
    transfers = TransferThread(KvPool(LAYERS, 2, 4, torch.float32), None, lambda session, done: outcomes.put(done))
    transfers.start_session(1)
    transfers.submit(1, Load(1, blocks(0), Patience(1.0)))
    transfers.submit(1, Save(2, blocks(0, 1)))

    assert outcomes.get(timeout=5) == LoadDone(1, reason="this executor has no block store")
    assert outcomes.get(timeout=5) == SaveDone(2, num_failed=2, reason="this executor has no block store")
    transfers.stop()


def test_a_block_outside_the_pool_is_reported_and_touches_nothing(rig: Rig) -> None:
    rig.transfers.submit(1, Load(1, blocks(0, 8), Patience(1.0)))

    assert rig.outcomes.get(timeout=5) == (1, LoadDone(1, reason="block ids outside the pool: [8]"))
    assert rig.store.calls == []


def test_a_bug_of_the_store_client_is_an_answer_and_not_silence(rig: Rig) -> None:
    rig.store.bug = RuntimeError("bug")
    rig.transfers.submit(1, Save(1, blocks(0)))

    assert rig.outcomes.get(timeout=5) == (1, SaveDone(1, num_failed=1, reason="RuntimeError('bug')"))


def test_a_save_travels_in_groups_so_that_loads_can_pass(rig: Rig) -> None:
    keys = [BlockKey(i.to_bytes(32, "big")) for i in range(80)]
    rig.transfers.submit(1, Save(1, [(key, BlockId(i % 8)) for i, key in enumerate(keys)]))

    assert rig.outcomes.get(timeout=5) == (1, SaveDone(1, num_written=80))
    assert rig.store.calls == ["save"] * 3


def test_a_load_that_waited_too_long_in_the_queue_asks_nobody(rig: Rig) -> None:
    rig.transfers.submit(1, Load(1, blocks(0), Patience(0.0)))

    _, done = rig.outcomes.get(timeout=5)

    assert isinstance(done, LoadDone)
    assert (done.num_loaded, done.reason) == (0, OUT_OF_TIME)
    assert rig.store.calls == []


def drain_before_the_gate_opens(transfers: TransferThread, store: MemoryStore) -> Drained:
    with ThreadPoolExecutor(1) as pool:
        drained = pool.submit(transfers.drain, 10.0)
        while not transfers.is_draining:
            time.sleep(0.001)
        store.gate.set()
        return drained.result()


def test_at_the_end_saves_that_wait_are_carried_out_and_loads_are_not(rig: Rig) -> None:
    rig.store.gate.clear()
    rig.transfers.submit(1, Save(1, blocks(0)))
    rig.store.started.wait(5)
    rig.transfers.submit(1, Save(2, blocks(1, 2)))
    rig.transfers.submit(1, Load(3, blocks(3), Patience(5.0)))

    assert drain_before_the_gate_opens(rig.transfers, rig.store) == Drained(num_saved=3, num_dropped=0)
    assert rig.store.calls == ["save", "save"]


def test_saves_that_are_not_through_in_time_are_dropped_group_by_group(rig: Rig) -> None:
    keys = [BlockKey(i.to_bytes(32, "big")) for i in range(80)]
    rig.store.gate.clear()
    rig.transfers.submit(1, Save(1, [(key, BlockId(i % 8)) for i, key in enumerate(keys)]))
    rig.transfers.submit(1, Save(2, blocks(0)))
    rig.store.started.wait(5)

    assert rig.transfers.drain(0.0) == Drained(num_saved=0, num_dropped=81)
    rig.store.gate.set()
    assert rig.outcomes.get(timeout=5) == (1, SaveDone(1, num_written=32, num_failed=48, reason=OUT_OF_TIME))


def test_saves_that_the_store_refuses_at_the_end_count_as_dropped(rig: Rig) -> None:
    rig.store.gate.clear()
    rig.transfers.submit(1, Save(1, blocks(0, 1)))
    rig.store.started.wait(5)
    rig.store.bug = RuntimeError("bug")

    assert drain_before_the_gate_opens(rig.transfers, rig.store) == Drained(num_saved=0, num_dropped=2)


def test_a_front_that_hears_nothing_any_more_does_not_end_transfers() -> None:
    """It closes its pipe first, then waits for what is on its way to the store."""

    def report(session: int, done: LoadDone | SaveDone) -> None:
        raise BrokenPipeError

    store = MemoryStore()
    transfers = TransferThread(KvPool(LAYERS, 8, 4, torch.float32), store, report)
    transfers.start_session(1)
    store.gate.clear()
    for save_id in range(3):
        transfers.submit(1, Save(save_id, [(KEYS[save_id], BlockId(save_id))]))

    assert drain_before_the_gate_opens(transfers, store) == Drained(num_saved=3, num_dropped=0)
    transfers.stop()
