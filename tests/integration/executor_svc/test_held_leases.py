"""An executor that sleeps past its leases and is killed with others: the store gets all back, steps and saves go on."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from common.errors import ExecutorLost
from octavo.executor.v1 import executor_service_pb2 as pb
from tests.integration.executor_svc.processes import ServiceProcess
from tests.integration.executor_svc.test_process import Scheduler, decode_plan, prompt_plan
from tests.integration.executor_svc.with_store import keys_of, num_stored, save_of, stats, store_and_executor
from tests.unit.executor_svc.tiny_engine import make_model_folder

BLOCKS_PER_SAVE = 32
TIMEOUT_S = 30.0


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.01)


class Saver:
    """Has an executor save blocks, always new ones."""

    def __init__(self, scheduler: Scheduler, store: ServiceProcess, worker: int):
        self._scheduler, self._store, self._worker = scheduler, store, worker
        self._numbers = itertools.count(1)

    def send(self) -> tuple[int, list[bytes]]:
        save_id = next(self._numbers)
        keys = keys_of(range(save_id * BLOCKS_PER_SAVE, (save_id + 1) * BLOCKS_PER_SAVE))
        self._scheduler.send(save_of(save_id, keys))
        return save_id, keys

    def stop_worker_with_leases(self) -> None:
        """SIGSTOP between a reservation and its commit: tried until the store says so."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            for _ in range(4):
                self.send()
            os.kill(self._worker, signal.SIGSTOP)
            if stats(self._store).tiers[0].num_leased_blocks > 0:
                return
            os.kill(self._worker, signal.SIGCONT)
            assert time.monotonic() < deadline_s, "it never held leases"

    def saved(self, save_id: int) -> pb.BlocksSaved:
        for event in self._scheduler.events:
            if event.blocks_saved.save_id == save_id:
                return event.blocks_saved
        raise AssertionError("the session ended")


def test_leases_of_an_executor_that_slept_or_was_killed_come_back(tmp_path: Path) -> None:
    model_folder = make_model_folder(tmp_path / "model")
    short = ("--session-ttl-s", "1", "--heartbeat-s", "0.2")
    with store_and_executor(tmp_path, model_folder, store_flags=short) as (store, executor):
        (worker,) = executor.children()
        scheduler = Scheduler(executor.target)
        scheduler.step(prompt_plan())
        saver = Saver(scheduler, store, worker)

        saver.stop_worker_with_leases()
        wait_until(lambda: stats(store).num_fenced_sessions == 1)
        assert stats(store).num_quarantined_blocks > 0, "it has the memory mapped and may still write there"
        os.kill(worker, signal.SIGCONT)
        scheduler.plan(decode_plan(2))
        wait_until(lambda: saver.saved(saver.send()[0]).num_failed == 0)  # in a new session
        save_id, keys = saver.send()
        assert saver.saved(save_id).num_written == BLOCKS_PER_SAVE
        assert num_stored(store, keys) == BLOCKS_PER_SAVE
        wait_until(lambda: stats(store).num_quarantined_blocks == 0)
        assert stats(store).num_checksum_mismatches == 0

        saver.stop_worker_with_leases()
        os.kill(worker, signal.SIGKILL)
        assert isinstance(scheduler.end_error(), ExecutorLost)
        assert executor.popen.wait(TIMEOUT_S) == 1
        wait_until(lambda: not stats(store).sessions)
        after = stats(store)
        assert (after.tiers[0].num_leased_blocks, after.num_quarantined_blocks) == (0, 0)
        assert after.tiers[0].used_bytes == 4096 * after.tiers[0].num_blocks
