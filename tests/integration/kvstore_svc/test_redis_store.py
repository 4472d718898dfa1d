"""Stores with a Redis below them, all real processes: hosts share blocks, and a Redis that fails costs misses, not requests."""

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from common.block_hash import chain_keys, kv_fingerprint, root_key
from common.degraded import DegradedPaths
from common.ids import BlockKey
from common.patience import Patience
from kvstore_svc.tiers.redis_value import HEADER_BYTES
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from tests.integration.kvstore_svc.redis_server import RedisServer
from tests.integration.kvstore_svc.store_process import MIB, TIMEOUT_S, BufferClient, StoreProcess, key, wait_until

BLOCK_BYTES = 100_000
NUM_BLOCKS = 30  # of about 40 that fit into the shared memory of a store
# A machine that is busy is no slow Redis.
PATIENT = ("--redis-deadline-s", "10", "--redis-timeout-s", "10", "--redis-lookup-timeout-s", "10", "--redis-off-s", "0.2")
NUM_CONNECTIONS = 4
HASTY = (
    "--redis-connections",
    str(NUM_CONNECTIONS),
    "--redis-timeout-s",
    "0.1",
    "--redis-lookup-timeout-s",
    "0.01",
    "--redis-off-s",
    "0.2",
)
StartStore = Callable[..., StoreProcess]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with closing(RedisServer(tmp_path)) as server:
        yield server


@pytest.fixture
def start(tmp_path: Path, redis: RedisServer) -> Iterator[StartStore]:
    """Starts a store of a host of its own, as far as that goes, above the same Redis."""
    with ExitStack() as stack:

        def start_store(name: str = "a", *flags: str) -> StoreProcess:
            folder = tmp_path / name
            folder.mkdir()
            return stack.enter_context(closing(StoreProcess(folder, "--redis-url", redis.url, *(flags or PATIENT))))

        yield start_store


def bytes_of(number: int) -> bytes:
    return hashlib.shake_128(number.to_bytes(4, "big")).digest(BLOCK_BYTES)


def blocks_of(*numbers: int) -> list[tuple[BlockKey, memoryview]]:
    return [(key(number), memoryview(bytes_of(number))) for number in numbers]


def room_for(*numbers: int) -> list[tuple[BlockKey, memoryview]]:
    return [(key(number), memoryview(bytearray(BLOCK_BYTES))) for number in numbers]


def load(client: BufferClient, *numbers: int, timeout_s: float = TIMEOUT_S) -> int:
    """How many leading blocks came; that their bytes are right is checked here."""
    into = room_for(*numbers)
    num_loaded = client.load(into, Patience(timeout_s)).num_loaded
    assert [bytes(data) for _, data in into[:num_loaded]] == [bytes_of(n) for n in numbers[:num_loaded]]
    return num_loaded


def save_down(client: BufferClient, redis: RedisServer, *numbers: int) -> None:
    """In steps: the way down has little room, and leaves out what finds none."""
    for number in numbers:
        num_before = len(redis.names())
        assert client.save(blocks_of(number)).num_failed == 0
        wait_until(lambda n=num_before: len(redis.names()) > n)  # type: ignore[misc]


def tier_stats(store: StoreProcess, tier: "pb.Tier.ValueType") -> pb.TierStats:
    return next(stats for stats in store.stats().tiers if stats.tier == tier)


def forget(store: StoreProcess, redis: RedisServer) -> None:
    """Shared memory forgets all; Redis does not."""
    values = {name: redis.client.get(name) for name in redis.names()}
    store.stub.ClearBlocks(pb.ClearBlocksRequest(), timeout=TIMEOUT_S)
    for name, value in values.items():
        redis.client.set(name, value)


def test_two_hosts_use_each_others_blocks(start: StartStore, redis: RedisServer) -> None:
    first, second = start("a"), start("b")
    numbers = range(NUM_BLOCKS)
    with closing(first.client(block_bytes=BLOCK_BYTES)) as writer, closing(second.client(block_bytes=BLOCK_BYTES)) as reader:
        save_down(writer, redis, *numbers)

        looked_up = second.stub.LookupBlocks(pb.LookupBlocksRequest(keys=[key(n) for n in (*numbers, 999)]), timeout=TIMEOUT_S)
        assert list(looked_up.tiers) == [pb.TIER_REDIS] * NUM_BLOCKS
        assert load(reader, *numbers) == NUM_BLOCKS
        assert load(reader, *numbers) == NUM_BLOCKS

    assert tier_stats(second, pb.TIER_REDIS).num_hits == NUM_BLOCKS  # the second time they were in shared memory
    assert tier_stats(first, pb.TIER_REDIS).num_writes == NUM_BLOCKS
    assert tier_stats(second, pb.TIER_REDIS).num_writes == 0


def test_blocks_outlive_the_store(start: StartStore, redis: RedisServer) -> None:
    store = start()
    with closing(store.client(block_bytes=BLOCK_BYTES)) as client:
        save_down(client, redis, 1, 2, 3)
        store.kill()
        store.restart()
        store.wait_ready()

        wait_until(lambda: load(client, 1, 2, 3, 4) == 3)


def test_other_weights_another_dtype_or_another_tenant_never_hit(start: StartStore, redis: RedisServer) -> None:
    """The same tokens, another fingerprint or salt: their keys have nothing in common."""
    store = start()
    token_ids = range(64)

    def keys(*, weights: str = "v1", dtype: str = "float32", salt: str = "") -> list[BlockKey]:
        fingerprint = kv_fingerprint({"weights": weights, "dtype": dtype})
        return chain_keys(root_key(fingerprint, salt), token_ids, 16)

    with closing(store.client(block_bytes=BLOCK_BYTES)) as client:
        client.save([(k, memoryview(bytes_of(n))) for n, k in enumerate(keys())])
        wait_until(lambda: len(redis.names()) == 4)
    forget(store, redis)

    def num_present(found: list[BlockKey]) -> int:
        return len(store.stub.LookupBlocks(pb.LookupBlocksRequest(keys=found), timeout=TIMEOUT_S).tiers)

    others = [keys(weights="v2"), keys(dtype="float8_e4m3fn"), keys(salt="tenant")]
    assert [num_present(found) for found in others] == [0, 0, 0]
    assert num_present(keys()) == 4


def test_flipped_bits_in_redis_are_misses_and_never_served(start: StartStore, redis: RedisServer) -> None:
    store = start()
    rng = random.Random(5)
    with closing(store.client(block_bytes=BLOCK_BYTES)) as client:
        save_down(client, redis, *range(NUM_BLOCKS))
        forget(store, redis)
        for name in redis.names():
            value = bytearray(redis.client.get(name))
            value[rng.randrange(HEADER_BYTES) if rng.random() < 0.5 else rng.randrange(len(value))] ^= 1 << rng.randrange(8)
            redis.client.set(name, bytes(value))

        assert [load(client, number) for number in range(NUM_BLOCKS)] == [0] * NUM_BLOCKS

        wait_until(lambda: redis.names() == [])  # they are removed
        save_down(client, redis, *range(NUM_BLOCKS))
        forget(store, redis)
        assert load(client, *range(NUM_BLOCKS)) == NUM_BLOCKS


def test_a_redis_that_is_down_at_the_start_or_is_none_is_no_reason_not_to_serve(start: StartStore, redis: RedisServer) -> None:
    redis.kill()
    store = start()
    with closing(store.client(block_bytes=BLOCK_BYTES)) as client:
        assert client.save(blocks_of(1, 2)).num_written == 2
        assert load(client, 1, 2, 3) == 2

        redis.restart()

        wait_until(lambda: client.save(blocks_of(random.randrange(1 << 30))).num_written == 1 and bool(redis.names()))
    assert "degraded: kvstore_redis_unavailable" in store.log
    assert "no longer degraded: kvstore_redis_unavailable" in store.log


class Worker(threading.Thread):
    """A client that saves and loads random runs of blocks, more than fit into shared memory, until told to stop."""

    def __init__(self, store: StoreProcess, seed: int):
        super().__init__()
        self.num_rounds = 0
        self.num_loaded = 0
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self.degraded = DegradedPaths()
        self._client = store.client(block_bytes=BLOCK_BYTES, degraded=self.degraded)
        self._random = random.Random(seed)

    def run(self) -> None:
        try:
            with closing(self._client):
                while not self.stopping.is_set():
                    first = self._random.randrange(100)
                    numbers = range(first, first + self._random.randint(1, 8))
                    if self._random.random() < 0.5:
                        self._client.save(blocks_of(*numbers))
                    self.num_loaded += load(self._client, *numbers, timeout_s=2.0)
                    self.num_rounds += 1
        except BaseException as error:
            self.failure = error


@pytest.fixture
def workers(start: StartStore) -> Iterator[Callable[[StoreProcess], list[Worker]]]:
    started: list[Worker] = []

    def start_workers(store: StoreProcess) -> list[Worker]:
        started.extend(Worker(store, seed) for seed in range(2))
        for worker in started:
            worker.start()
        return started

    yield start_workers
    for worker in started:
        worker.stopping.set()
        worker.join(TIMEOUT_S)
    assert [worker.failure for worker in started] == [None] * len(started)


def go_on(workers: list[Worker], num_rounds: int) -> None:
    """Until each worker has done so much more."""
    goals = [worker.num_rounds + num_rounds for worker in workers]
    wait_until(lambda: all(w.failure or w.num_rounds >= goal for w, goal in zip(workers, goals, strict=True)))


def held_by(store: StoreProcess) -> tuple[int, int]:
    """Descriptors and threads."""
    process = psutil.Process(store.process.pid)
    return process.num_fds(), process.num_threads()


def test_requests_go_on_while_redis_dies_freezes_fills_up_and_comes_back(
    start: StartStore, redis: RedisServer, workers: Callable[[StoreProcess], list[Worker]]
) -> None:
    store = start("a", *HASTY)
    running = workers(store)
    go_on(running, 20)
    num_fds, num_threads = held_by(store)

    for _ in range(4):
        redis.freeze()
        go_on(running, 10)
        redis.thaw()
        go_on(running, 10)
        redis.kill()
        go_on(running, 10)
        redis.restart()
        go_on(running, 10)
    redis.client.config_set("maxmemory", "4mb")
    go_on(running, 20)
    redis.client.config_set("maxmemory-policy", "allkeys-lru")
    go_on(running, 20)
    num_hits = tier_stats(store, pb.TIER_REDIS).num_hits
    wait_until(lambda: tier_stats(store, pb.TIER_REDIS).num_hits > num_hits)

    for worker in running:
        worker.stopping.set()
        worker.join(TIMEOUT_S)
        assert not worker.degraded.counts["kvstore_unavailable"]
        assert not worker.degraded.counts["kvstore_corrupt"]
    wait_until(lambda: tier_stats(store, pb.TIER_SHM).num_leased_blocks == 0)
    # Not all connections were open, and not all threads needed, when it was counted.
    most = (num_fds + NUM_CONNECTIONS, num_threads + 8)
    wait_until(lambda: all(held <= allowed for held, allowed in zip(held_by(store), most, strict=True)))


def test_a_store_stops_in_good_order_while_redis_does_not_answer(start: StartStore, redis: RedisServer) -> None:
    store = start()
    with closing(store.client(block_bytes=BLOCK_BYTES)) as client:
        client.save(blocks_of(1))
        wait_until(lambda: len(redis.names()) == 1)
        redis.freeze()
        client.save(blocks_of(2, 3))
        assert load(client, 1, 2, 3) == 3

        assert store.stop() == 0
    redis.thaw()


def test_blocks_larger_than_sockets_take_at_once(start: StartStore, redis: RedisServer) -> None:
    store = start("a", *PATIENT, "--capacity-bytes", str(32 * MIB))
    data = hashlib.shake_128(b"large").digest(8 * MIB)
    into = memoryview(bytearray(len(data)))
    with closing(store.client(block_bytes=len(data))) as client:
        client.save([(key(1), memoryview(data))])
        wait_until(lambda: len(redis.names()) == 1)
        forget(store, redis)

        assert client.load([(key(1), into)], Patience(TIMEOUT_S)).num_loaded == 1
    assert bytes(into) == data


@pytest.mark.parametrize("url", ["localhost:6379", "redis://:pw@localhost?no_such_option=1"])
def test_a_url_that_is_none_ends_the_start_with_a_sentence(tmp_path: Path, url: str) -> None:
    with pytest.raises(AssertionError, match="--redis-url") as caught:
        StoreProcess(tmp_path, "--redis-url", url)
    assert "pw" not in str(caught.value).replace("kvstore", "")
