"""A real executor above a real block store, and a scheduler that has it save blocks."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc

from octavo.executor.v1 import executor_service_pb2 as pb
from octavo.kvstore.v1 import kv_store_service_pb2 as kv_pb
from octavo.kvstore.v1 import kv_store_service_pb2_grpc
from tests.integration.executor_svc.processes import ServiceProcess, executor_flags, running


def keys_of(numbers: Sequence[int]) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def save_of(save_id: int, keys: Sequence[bytes]) -> pb.RunSessionRequest:
    """Blocks 0, 1, ... under these keys."""
    return pb.RunSessionRequest(save_blocks=pb.SaveBlocks(save_id=save_id, keys=keys, block_ids=range(len(keys))))


@contextmanager
def store_and_executor(
    folder: Path, model_folder: Path, *, store_flags: Sequence[str] = (), executor_flags_: Sequence[str] = ()
) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    memory = ["--shm-socket", f"{folder}/shm.sock", "--capacity-bytes", str(16 << 20), "--slab-bytes", str(8 << 20)]
    with running("kvstore_svc", folder, [*memory, "--disk-capacity-bytes", "0", *store_flags], name="kvstore") as store:
        store.wait_serving()
        own = executor_flags(model_folder, "--kvstore", store.target, *executor_flags_)
        with running("executor_svc", folder, own, name="executor") as executor:
            executor.wait_serving()
            try:
                yield store, executor
            finally:
                store.popen.send_signal(signal.SIGCONT)


def stats(store: ServiceProcess) -> kv_pb.GetStatsResponse:
    with grpc.insecure_channel(store.target) as channel:
        return kv_store_service_pb2_grpc.KvStoreServiceStub(channel).GetStats(kv_pb.GetStatsRequest(), timeout=10)


def num_stored(store: ServiceProcess, keys: Sequence[bytes]) -> int:
    """How many leading blocks it has."""
    with grpc.insecure_channel(store.target) as channel:
        stub = kv_store_service_pb2_grpc.KvStoreServiceStub(channel)
        return len(stub.LookupBlocks(kv_pb.LookupBlocksRequest(keys=keys), timeout=10).tiers)
