"""SIGTERM with blocks on their way to a real block store: they are written first, for as long as they may be."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.kvstore.v1 import kv_store_service_pb2 as kv_pb
from octavo.kvstore.v1 import kv_store_service_pb2_grpc
from tests.integration.executor_svc.processes import ServiceProcess, executor_flags, running
from tests.integration.executor_svc.test_process import Scheduler, decode_plan, prompt_plan
from tests.unit.executor_svc.tiny_engine import make_model_folder

NUM_SAVES, BLOCKS_PER_SAVE = 3, 40
KEYS = [number.to_bytes(32, "big") for number in range(1, NUM_SAVES * BLOCKS_PER_SAVE + 1)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@contextmanager
def store_and_executor(folder: Path, model_folder: Path, *flags: str) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    store_flags = ["--shm-socket", f"{folder}/shm.sock", "--capacity-bytes", str(16 << 20), "--slab-bytes", str(8 << 20)]
    with running("kvstore_svc", folder, [*store_flags, "--disk-capacity-bytes", "0"], name="kvstore") as store:
        store.wait_serving()
        own = executor_flags(model_folder, "--kvstore", store.target, *flags)
        with running("executor_svc", folder, own, name="executor") as executor:
            executor.wait_serving()
            try:
                yield store, executor
            finally:
                store.popen.send_signal(signal.SIGCONT)


def send_saves(executor: ServiceProcess) -> Scheduler:
    """A scheduler whose saves have all arrived: the plan behind them is carried out."""
    scheduler = Scheduler(executor.target)
    scheduler.step(prompt_plan())
    for save_id in range(NUM_SAVES):
        keys = KEYS[save_id * BLOCKS_PER_SAVE : (save_id + 1) * BLOCKS_PER_SAVE]
        blocks = [pb.KeyedBlock(key=key, block_id=at) for at, key in enumerate(keys)]
        scheduler.send(pb.RunSessionRequest(save_blocks=pb.SaveBlocks(save_id=save_id, blocks=blocks)))
    scheduler.step(decode_plan(2))
    return scheduler


def num_stored(store: ServiceProcess) -> int:
    with grpc.insecure_channel(store.target) as channel:
        stub = kv_store_service_pb2_grpc.KvStoreServiceStub(channel)
        return len(stub.LookupBlocks(kv_pb.LookupBlocksRequest(keys=KEYS), timeout=10).tiers)


def test_saves_that_wait_at_sigterm_are_in_the_store_afterwards(model_folder: Path, tmp_path: Path) -> None:
    with store_and_executor(tmp_path, model_folder, "--save-drain-s", "30") as (store, executor):
        store.popen.send_signal(signal.SIGSTOP)  # nothing gets through before the signal
        scheduler = send_saves(executor)
        executor.popen.send_signal(signal.SIGTERM)
        assert scheduler.end_error() is not None
        store.popen.send_signal(signal.SIGCONT)

        assert executor.popen.wait(30) == 0
        assert num_stored(store) == len(KEYS)
        assert f"saves at the end: {len(KEYS)} blocks saved, 0 dropped" in executor.log_text()


def test_a_store_that_stands_still_holds_the_end_up_for_no_longer_than_it_may(model_folder: Path, tmp_path: Path) -> None:
    with store_and_executor(tmp_path, model_folder, "--save-drain-s", "0.2") as (store, executor):
        store.popen.send_signal(signal.SIGSTOP)
        scheduler = send_saves(executor)
        executor.popen.send_signal(signal.SIGTERM)

        assert scheduler.end_error() is not None
        assert executor.popen.wait(30) == 0
        assert f"saves at the end: 0 blocks saved, {len(KEYS)} dropped" in executor.log_text()
        assert "killing it" not in executor.log_text()
