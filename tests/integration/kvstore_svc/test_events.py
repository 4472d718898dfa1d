"""Events of a real store: what a reader replays is what the store has, however slow it reads."""

from collections.abc import Callable, Iterator
from contextlib import closing

import grpc

from common.ids import BlockKey
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from tests.integration.kvstore_svc.store_process import MIB, TIMEOUT_S, StoreProcess, key, wait_until

SMALL = ("--max-events", "64", "--capacity-bytes", str(8 * MIB))


class Replica:
    """What a reader knows of a store, as a router would keep it."""

    def __init__(self, store: StoreProcess):
        self.keys: set[bytes] = set()
        self.epoch = self.sequence = self.num_resyncs = 0
        self._store = store
        self._call: Iterator[pb.WatchEventsResponse] | None = None

    def connect(self) -> None:
        """Begins, or goes on where it was."""
        request = pb.WatchEventsRequest(epoch=self.epoch, sequence=self.sequence)
        self._call = self._store.stub.WatchEvents(request, timeout=TIMEOUT_S)

    def read(self) -> pb.WatchEventsResponse:
        """The next response, applied."""
        assert self._call is not None
        response = next(self._call)
        if response.resync:
            self.keys.clear()
            self.num_resyncs += 1
        for event in response.events:
            assert event.tier == pb.TIER_SHM
            (self.keys.add if event.kind == pb.BLOCK_EVENT_KIND_STORED else self.keys.discard)(event.key)
        self.epoch, self.sequence = response.epoch, response.sequence or self.sequence
        return response

    def read_until(self, keys: set[BlockKey]) -> None:
        """Until it knows just these keys."""
        while self.keys != keys:
            self.read()

    def disconnect(self) -> None:
        """Reads no more."""
        assert isinstance(self._call, grpc.Call)
        self._call.cancel()


def save(store: StoreProcess, *numbers: int) -> set[BlockKey]:
    with closing(store.client()) as client:
        report = client.save([(key(number), memoryview(bytes(4096))) for number in numbers])
        assert report.num_written == len(numbers)
    return {key(number) for number in numbers}


def clear(store: StoreProcess) -> None:
    store.stub.ClearBlocks(pb.ClearBlocksRequest(), timeout=TIMEOUT_S)


def test_a_reader_gets_what_is_there_and_then_what_changes(store: StoreProcess) -> None:
    first = save(store, 1, 2, 3)
    replica = Replica(store)
    replica.connect()

    response = replica.read()
    assert response.resync
    assert replica.keys == first

    second = save(store, 4, 5)
    replica.read_until(first | second)
    clear(store)
    replica.read_until(set())
    assert replica.num_resyncs == 1


def test_an_empty_store_is_known_to_be_empty(store: StoreProcess) -> None:
    replica = Replica(store)
    replica.connect()

    response = replica.read()

    assert (response.resync, len(response.events)) == (True, 0)


def test_a_reader_who_comes_back_soon_goes_on_where_it_was(store: StoreProcess) -> None:
    first = save(store, 1, 2)
    replica = Replica(store)
    replica.connect()
    replica.read_until(first)
    replica.disconnect()
    second = save(store, 3)

    replica.connect()
    replica.read_until(first | second)

    assert replica.num_resyncs == 1


def test_a_reader_who_was_away_for_too_long_begins_again(start_store: Callable[..., StoreProcess]) -> None:
    store = start_store(*SMALL)
    replica = Replica(store)
    replica.connect()
    replica.read_until(save(store, 1))
    replica.disconnect()
    clear(store)
    now = save(store, *range(100, 200))

    replica.connect()

    assert replica.read().resync
    replica.read_until(now)


def test_after_a_restart_a_reader_begins_again(store: StoreProcess) -> None:
    replica = Replica(store)
    replica.connect()
    replica.read_until(save(store, 1, 2))
    store.kill()
    store.restart()
    store.wait_ready()

    def begins_again() -> bool:
        try:
            replica.connect()
            return replica.read().resync
        except grpc.RpcError:  # the channel has not noticed yet
            return False

    wait_until(begins_again)
    assert replica.keys == set()
    replica.read_until(save(store, 3))


def test_a_reader_who_does_not_read_holds_up_nobody_and_is_told_what_it_lost(start_store: Callable[..., StoreProcess]) -> None:
    store = start_store(*SMALL)
    slow, quick = Replica(store), Replica(store)
    slow.connect()
    quick.connect()
    assert slow.read().resync

    for _ in range(12):  # far more than what fits into the network between them
        quick.read_until(save(store, *range(1000)))
        clear(store)
        quick.read_until(set())
    last = save(store, *range(5000, 5050))

    slow.read_until(last)
    assert slow.num_resyncs > 1
    quick.read_until(last)


def test_streams_of_events_do_not_keep_a_store_from_stopping(store: StoreProcess) -> None:
    replica = Replica(store)
    replica.connect()
    replica.read()

    assert store.stop() == 0
