"""The disk tier of a real store: what was used twice is there after a restart, whatever happened in between."""

from collections.abc import Callable
from contextlib import closing

from common.ids import BlockKey
from executor_svc.clients.kvstore import BlockStoreClient
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from tests.integration.kvstore_svc.store_process import MIB, StoreProcess, key, wait_until

DISK = ("--disk-capacity-bytes", str(16 * MIB))


def data_of(number: int) -> memoryview:
    return memoryview(bytearray(number.to_bytes(2, "big") * 2048))


def save(client: BlockStoreClient, *numbers: int) -> None:
    report = client.save([(key(number), data_of(number)) for number in numbers])
    assert report.num_failed == 0, report.reason


def loaded(client: BlockStoreClient, *numbers: int) -> list[bool]:
    """Whether each comes back; its bytes are checked."""
    found = []
    for number in numbers:
        into = memoryview(bytearray(4096))
        is_there = client.load([(key(number), into)], 10.0).num_loaded == 1
        assert not is_there or into == data_of(number)
        found.append(is_there)
    return found


def look_up(store: StoreProcess, *numbers: int) -> list["pb.Tier.ValueType"]:
    keys: list[BlockKey] = [key(number) for number in numbers]
    return list(store.stub.LookupBlocks(pb.LookupBlocksRequest(keys=keys), timeout=10).tiers)


def disk_stats(store: StoreProcess) -> pb.TierStats:
    return next(tier for tier in store.stats().tiers if tier.tier == pb.TIER_DISK)


def restart(store: StoreProcess) -> None:
    assert store.stop() == 0
    store.restart()
    store.wait_ready()


def test_blocks_that_were_used_twice_are_there_after_a_restart(start_store: Callable[..., StoreProcess]) -> None:
    store = start_store(*DISK)
    with closing(store.client()) as client:
        save(client, 1, 2, 3, 4)
        assert look_up(store, 1, 2, 3) == [pb.TIER_SHM] * 3

    restart(store)

    assert look_up(store, 1, 2, 3) == [pb.TIER_DISK] * 3
    with closing(store.client()) as client:
        assert loaded(client, 1, 2, 3, 4) == [True, True, True, False]
    assert look_up(store, 1) == [pb.TIER_SHM]
    assert disk_stats(store).num_hits == 3


def test_a_client_that_holds_a_chain_on_its_device_uses_it(start_store: Callable[..., StoreProcess]) -> None:
    store = start_store(*DISK)
    with closing(store.client()) as client:
        save(client, 1, 2)
        store.stub.LookupBlocks(pb.LookupBlocksRequest(keys=[key(9)], held_keys=[key(1), key(2)]), timeout=10)

    wait_until(lambda: disk_stats(store).num_blocks == 2)
