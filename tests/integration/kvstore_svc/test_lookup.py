"""The scheduler's view of the store."""

import os
from contextlib import closing

from common.degraded import DegradedPaths
from scheduler_svc.clients.kvstore import BlockStoreLookup
from tests.integration.kvstore_svc.store_process import BufferClient, StoreProcess, key


def save(client: BufferClient, *numbers: int) -> None:
    assert client.save([(key(n), memoryview(os.urandom(4096))) for n in numbers]).num_failed == 0


async def test_it_names_the_tiers_of_the_leading_keys(empty_store: StoreProcess) -> None:
    lookup = BlockStoreLookup(empty_store.address, DegradedPaths())
    with closing(empty_store.client("shm")) as client:
        save(client, 1, 2, 4)

    assert await lookup.lookup([key(n) for n in (1, 2, 3, 4)], 5.0, 5.0) == ["shm", "shm"]
    assert (lookup.connected, lookup.reason) == (True, "")
    assert await lookup.lookup([], 5.0, 5.0) == []
    await lookup.close()


async def test_it_shows_counters_and_clears(empty_store: StoreProcess) -> None:
    lookup = BlockStoreLookup(empty_store.address, DegradedPaths())
    with closing(empty_store.client("shm")) as client:
        save(client, 1, 2)

    stats = await lookup.stats()
    assert stats is not None
    assert stats.tiers[0].num_blocks == 2
    assert await lookup.clear() == 2
    assert await lookup.lookup([key(1)], 5.0, 5.0) == []
    await lookup.close()


async def test_a_dead_store_has_nothing(store: StoreProcess) -> None:
    store.kill()
    degraded = DegradedPaths()
    lookup = BlockStoreLookup(store.address, degraded)

    assert await lookup.lookup([key(1)], 1.0, 1.0) == []
    assert await lookup.stats() is None
    assert await lookup.clear() == 0
    assert not lookup.connected
    assert lookup.reason
    assert degraded.counts["kvstore_unavailable"] == 1, "it is asked once and then left alone for a while"
    await lookup.close()


async def test_without_a_store_nothing_is_asked() -> None:
    degraded = DegradedPaths()
    lookup = BlockStoreLookup(None, degraded)

    assert await lookup.lookup([key(1)], 1.0, 1.0) == []
    assert await lookup.stats() is None
    assert (lookup.connected, lookup.reason) == (False, "no block store is configured")
    assert not degraded.counts
    await lookup.close()
