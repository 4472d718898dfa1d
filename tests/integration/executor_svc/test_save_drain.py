"""SIGTERM with blocks on their way to a real block store: they are written first, for as long as they may be."""

import signal
from pathlib import Path

import pytest

from tests.integration.executor_svc.processes import ServiceProcess
from tests.integration.executor_svc.test_process import Scheduler, decode_plan, prompt_plan
from tests.integration.executor_svc.with_store import keys_of, num_stored, save_of, store_and_executor
from tests.unit.executor_svc.tiny_engine import make_model_folder

NUM_SAVES, BLOCKS_PER_SAVE = 3, 40
KEYS = keys_of(range(1, NUM_SAVES * BLOCKS_PER_SAVE + 1))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def send_saves(executor: ServiceProcess) -> Scheduler:
    """A scheduler whose saves have all arrived: the plan behind them is carried out."""
    scheduler = Scheduler(executor.target)
    scheduler.step(prompt_plan())
    for save_id in range(NUM_SAVES):
        scheduler.send(save_of(save_id, KEYS[save_id * BLOCKS_PER_SAVE : (save_id + 1) * BLOCKS_PER_SAVE]))
    scheduler.step(decode_plan(2))
    return scheduler


def test_saves_that_wait_at_sigterm_are_in_the_store_afterwards(model_folder: Path, tmp_path: Path) -> None:
    with store_and_executor(tmp_path, model_folder, executor_flags_=("--save-drain-s", "30")) as (store, executor):
        store.popen.send_signal(signal.SIGSTOP)  # nothing gets through before the signal
        scheduler = send_saves(executor)
        executor.popen.send_signal(signal.SIGTERM)
        assert scheduler.end_error() is not None
        store.popen.send_signal(signal.SIGCONT)

        assert executor.popen.wait(30) == 0
        assert num_stored(store, KEYS) == len(KEYS)
        assert f"saves at the end: {len(KEYS)} blocks saved, 0 dropped" in executor.log_text()


def test_a_store_that_stands_still_holds_the_end_up_for_no_longer_than_it_may(model_folder: Path, tmp_path: Path) -> None:
    with store_and_executor(tmp_path, model_folder, executor_flags_=("--save-drain-s", "0.2")) as (store, executor):
        store.popen.send_signal(signal.SIGSTOP)
        scheduler = send_saves(executor)
        executor.popen.send_signal(signal.SIGTERM)

        assert scheduler.end_error() is not None
        assert executor.popen.wait(30) == 0
        assert f"saves at the end: 0 blocks saved, {len(KEYS)} dropped" in executor.log_text()
        assert "killing it" not in executor.log_text()
