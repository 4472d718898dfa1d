"""What `octavo kv` asks a store for: lists, durable blocks, a verification, an export."""

from collections.abc import Callable
from contextlib import closing

import pytest

from common.shm.checksum import checksum
from octavo.kvstore.v1 import kv_store_admin_service_pb2 as pb
from octavo.kvstore.v1 import kv_store_admin_service_pb2_grpc as pb_grpc
from octavo.kvstore.v1 import kv_store_service_pb2
from tests.integration.kvstore_svc.store_process import FINGERPRINT, StoreProcess, key
from tests.integration.kvstore_svc.test_disk import DISK, data_of, disk_stats, flip_byte_of, restart, save

LAYOUT = kv_store_service_pb2.Layout(fingerprint=FINGERPRINT, block_bytes=4096)
NOTHING = pb.ExportBlocksRequest()


@pytest.fixture
def disk_store(start_store: Callable[..., StoreProcess]) -> StoreProcess:
    return start_store(*DISK)


def admin(store: StoreProcess) -> "pb_grpc.KvStoreAdminServiceStub":
    return pb_grpc.KvStoreAdminServiceStub(store.channel)


def persist(store: StoreProcess, *numbers: int) -> list[bool]:
    request = pb.PersistBlocksRequest(keys=[key(number) for number in numbers])
    return list(admin(store).PersistBlocks(request, timeout=20).durable)


def export(store: StoreProcess, request: pb.ExportBlocksRequest = NOTHING) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    last = b""
    for chunk in admin(store).ExportBlocks(request, timeout=20):
        if chunk.key:
            last = chunk.key
            assert chunk.layout == LAYOUT
        found[last] = found.get(last, b"") + chunk.data
    return found


def test_persisted_blocks_survive_kill_9(disk_store: StoreProcess) -> None:
    store = disk_store
    with closing(store.client()) as client:
        save(client, *range(200))

        assert persist(store, *range(200), 999) == [True] * 200 + [False]

    store.kill()
    store.restart()
    store.wait_ready()
    assert disk_stats(store).num_blocks == 200
    assert persist(store, 0, 199) == [True, True]
    assert export(store) == {key(number): bytes(data_of(number)) for number in range(200)}


def test_layouts_are_listed_by_tier(disk_store: StoreProcess) -> None:
    with closing(disk_store.client()) as client:
        save(client, 1, 2)
    persist(disk_store, 1)

    listed = admin(disk_store).ListLayouts(pb.ListLayoutsRequest(), timeout=20).layouts

    assert [(entry.layout, entry.tier, entry.num_blocks) for entry in listed] == [
        (LAYOUT, kv_store_service_pb2.TIER_SHM, 2),
        (LAYOUT, kv_store_service_pb2.TIER_DISK, 1),
    ]


def test_a_verification_finds_and_drops_what_is_wrong(disk_store: StoreProcess) -> None:
    with closing(disk_store.client()) as client:
        save(client, *range(9))
    persist(disk_store, *range(9))
    restart(disk_store)
    flip_byte_of(disk_store, 4)

    *_, last = admin(disk_store).VerifyBlocks(pb.VerifyBlocksRequest(), timeout=20)

    assert (last.num_blocks, last.num_checked, last.num_checked_bytes, last.num_bad) == (9, 9, 9 * 4096, 1)
    assert disk_stats(disk_store).num_blocks == 8
    *_, last = admin(disk_store).VerifyBlocks(pb.VerifyBlocksRequest(layout_fingerprint=b"x" * 32), timeout=20)
    assert (last.num_blocks, last.num_bad) == (0, 0)


def test_chosen_blocks_are_exported_from_memory_and_from_disk(disk_store: StoreProcess) -> None:
    with closing(disk_store.client()) as client:
        save(client, 1)
        persist(disk_store, 1)
        restart(disk_store)
        save(client, 2)
    keys = [key(2), key(1), key(3)]

    assert export(disk_store, pb.ExportBlocksRequest(keys=keys)) == {key(n): bytes(data_of(n)) for n in (2, 1)}
    assert disk_store.stats().tiers[0].num_blocks == 1, "what is exported does not come up"
    assert not [s for s in disk_store.stats().sessions if s.client_id == "inventory"]


def test_blocks_of_shared_memory_are_exported_without_a_disk_tier(store: StoreProcess) -> None:
    with closing(store.client()) as client:
        save(client, 1)

    assert export(store) == {key(1): bytes(data_of(1))}
    assert persist(store, 1) == [False]
    assert checksum(data_of(1)) == checksum(export(store)[key(1)])
