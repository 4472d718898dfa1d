"""The Redis tier and servers that fail in every way we know: all is a miss, nothing raises, hangs or leaks, and it comes back."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from kvstore_svc.tiers.redis_value import HEADER_BYTES
from tests.integration.kvstore_svc.redis_rig import BLOCK_BYTES, Rig, data_of, tier_of
from tests.integration.kvstore_svc.redis_server import Answer, RedisServer, listening
from tests.integration.kvstore_svc.store_process import key

SHORT_S = 0.1
NEVER_S = 1000.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with closing(RedisServer(tmp_path)) as found:
        yield found


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    """Neither threads nor descriptors are more than before."""
    process = psutil.Process()
    num_fds = process.num_fds()
    yield
    await until(lambda: not any(thread.name.startswith("redis") for thread in threading.enumerate()))
    await until(lambda: process.num_fds() <= num_fds)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def until_is(expected: object, ask: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(20):
        while await ask() != expected:
            await asyncio.sleep(0.01)


async def is_of_no_use(rig: Rig) -> None:
    """Everything is a miss, again and again."""
    for _ in range(3):
        assert await rig.tier.contains([key(1), key(2)]) == [False, False]
        assert await asyncio.gather(*(rig.get(number) for number in range(12))) == [None] * 12
        assert await rig.put(1) == [False]
        assert not await rig.tier.evict(key(1))
        assert await rig.tier.clear(None) == 0


async def test_a_server_that_is_down_at_the_start_is_used_when_it_comes_up(tmp_path: Path) -> None:
    async with tier_of(f"unix://{tmp_path}/valkey.sock") as rig:
        await is_of_no_use(rig)
        await until(lambda: "No such file" in rig.reason)

        with closing(RedisServer(tmp_path)):
            await until(lambda: rig.reason == "")
            assert await rig.put(1) == [True]
            assert await rig.get(1) == data_of(1)


async def test_a_server_that_dies_is_left_alone_and_used_again_when_it_is_back(server: RedisServer) -> None:
    async with tier_of(server.url) as rig:
        await rig.put(1)
        server.kill()

        await is_of_no_use(rig)
        await until(lambda: rig.reason != "")
        assert rig.degraded.counts["kvstore_redis_unavailable"] >= 5

        server.restart()
        await until(lambda: rig.reason == "")
        assert await rig.get(1) is None
        assert await rig.put(1) == [True]
        assert await rig.get(1) == data_of(1)


async def test_connections_that_the_server_closed_while_they_were_idle_cost_nothing(server: RedisServer) -> None:
    async with tier_of(server.url, off_s=NEVER_S) as rig:
        await rig.put(*range(8))
        await asyncio.gather(*(rig.get(n) for n in range(8)))
        server.client.client_kill_filter(_type="normal", skipme=True)

        found = await asyncio.gather(*(rig.get(n) for n in range(8)))

        assert found == [data_of(n) for n in range(8)]
        assert rig.degraded.counts["kvstore_redis_unavailable"] <= 1  # the watch may have asked at that moment


async def test_a_server_that_does_not_answer_is_left_alone(server: RedisServer) -> None:
    async with tier_of(server.url, timeout_s=SHORT_S, off_s=NEVER_S) as rig:
        await until_is([True], lambda: rig.put(1))
        server.freeze()

        found = await asyncio.gather(*(rig.get(1) for _ in range(200)))  # each alone would wait

        assert found == [None] * 200
        assert rig.reason != ""
        assert rig.degraded.counts["kvstore_redis_unavailable"] < 20
        await is_of_no_use(rig)
        server.thaw()


async def test_a_server_that_answers_again_is_used_again_and_late_answers_are_nobodys(server: RedisServer) -> None:
    async with tier_of(server.url, timeout_s=SHORT_S) as rig:
        await until_is([True, True, True], lambda: rig.put(1, 2, 3))
        server.freeze()
        await asyncio.gather(*(rig.get(n) for n in (1, 2, 3) * 4))
        server.thaw()

        await until(lambda: rig.reason == "")
        for number in (3, 2, 1, 4):
            await until_is(data_of(number) if number < 4 else None, lambda n=number: rig.get(n))  # type: ignore[misc]


async def test_memory_of_a_get_that_was_cancelled_is_not_written_any_more(server: RedisServer) -> None:
    async with tier_of(server.url) as rig:
        await rig.put(1)
        await rig.get(1)
        server.freeze()
        into = bytearray(BLOCK_BYTES)
        getting = asyncio.create_task(rig.tier.get(key(1), memoryview(into)))
        await asyncio.sleep(0.05)  # most likely it waits for the answer now; if not, the test shows less

        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        into[:] = b"m" * BLOCK_BYTES
        server.thaw()

        assert await rig.get(1) == data_of(1)
        assert bytes(into) == b"m" * BLOCK_BYTES
        assert not rig.degraded.counts["kvstore_redis_unavailable"]


async def test_gets_that_are_cancelled_all_the_time_leave_the_others_alone(server: RedisServer) -> None:
    async with tier_of(server.url) as rig:
        await rig.put(*range(4))
        for round_number in range(40):
            tasks = [asyncio.create_task(rig.get(n % 4)) for n in range(12)]
            for _ in range(round_number % 7):
                await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert found[1::2] == [data_of(n % 4) for n in range(1, 12, 2)]
            assert all(isinstance(f, asyncio.CancelledError) or f == data_of(n % 4) for n, f in enumerate(found))
        assert not rig.degraded.counts["kvstore_redis_unavailable"]


async def test_a_full_server_refuses_writes_and_still_serves_reads(server: RedisServer) -> None:
    async with tier_of(server.url) as rig:
        await rig.put(1)
        server.client.config_set("maxmemory", "1mb")

        assert (await rig.put(*range(2, 20)))[-1] is False
        assert rig.degraded.counts["kvstore_redis_refuses_writes"] > 0
        assert rig.reason == ""
        assert await rig.get(1) == data_of(1)

        server.client.config_set("maxmemory", "100mb")
        await until_is([True], lambda: rig.put(20))
        assert await rig.get(20) == data_of(20)


async def test_what_the_server_evicted_is_a_miss(tmp_path: Path) -> None:
    with closing(RedisServer(tmp_path, "--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru")) as server:
        async with tier_of(server.url) as rig:
            assert await rig.put(*range(60)) == [True] * 60

            found = await asyncio.gather(*(rig.get(n) for n in range(60)))

            assert found[0] is None
            assert found[59] == data_of(59)
            assert all(f is None or f == data_of(n) for n, f in enumerate(found))
            await until(lambda: rig.tier.counts().num_evictions > 0)
            assert rig.tier.counts().capacity_bytes == 6 << 20
            assert not rig.degraded.counts


async def test_a_replica_that_is_read_only_serves_reads(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    async with tier_of(server.url) as rig:
        await rig.put(1)
        server.client.replicaof("127.0.0.1", "1")
        server.client.config_set("replica-serve-stale-data", "yes")

        assert await rig.put(2) == [False]

        assert rig.degraded.counts["kvstore_redis_refuses_writes"] == 1
        assert await rig.tier.contains([key(1)]) == [True]


@pytest.mark.parametrize("credentials", ["", ":wrong@", "nobody:pw@"])
async def test_a_wrong_password_is_a_reason_not_an_error(tmp_path: Path, credentials: str) -> None:
    with closing(RedisServer(tmp_path, password="right")) as server:
        async with tier_of(f"unix://{credentials}{server.socket}") as rig:
            await is_of_no_use(rig)
            await until(lambda: "uthenticat" in rig.reason or "WRONGPASS" in rig.reason or "password" in rig.reason)


# Servers that are none


def saying(data: bytes) -> Answer:
    """To each question, whatever it is."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    return answer


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pass


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def talk_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(os.urandom(1000))
        await writer.drain()
        await asyncio.sleep(0)


async def say_random_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(1 << 16):
        writer.write(os.urandom(HEADER_BYTES + BLOCK_BYTES))
        await writer.drain()


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A reply that never ends, with a byte now and then."""
    await reader.read(1)
    writer.write(b"$1000\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(SHORT_S / 20)


_STRING = b"$%d\r\n" % (HEADER_BYTES + BLOCK_BYTES)
NO_SERVERS: dict[str, Answer] = {
    "hangs up": hang_up,
    "says nothing": say_nothing,
    "talks without being asked": talk_at_once,
    "random bytes": say_random_bytes,
    "a byte now and then": drip,
    "half a line": saying(b"$12"),
    "half a string": saying(_STRING + b"x" * 1000),
    "a string without its end": saying(_STRING + bytes(HEADER_BYTES + BLOCK_BYTES) + b"xx"),
    "a string of zeros": saying(_STRING + bytes(HEADER_BYTES + BLOCK_BYTES) + b"\r\n"),
    "a string that is too long to be true": saying(b"$99999999999\r\n" + b"x" * 100_000),
    "negative length": saying(b"$-7\r\n"),
    "number": saying(b":5\r\n"),
    "numbers that nobody asked for": saying(b":500\r\n" * 50),
    "nothing, twice": saying(b"$-1\r\n$-1\r\n"),
    "errors": saying(b"-ERR go away\r\n"),
    "is loading": saying(b"-LOADING server is loading the dataset in memory\r\n"),
    "very long error": saying(b"-" + b"e" * 100_000 + b"\r\n"),
    "arrays in arrays": saying(b"*1\r\n" * 1000),
    "a web server": saying(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"),
    "line ends": saying(b"\r\n" * 1000),
    "zeros": saying(bytes(10_000)),
}


@pytest.mark.parametrize("answer", NO_SERVERS.values(), ids=NO_SERVERS.keys())
async def test_something_else_that_listens_there_is_of_no_use_and_does_no_harm(answer: Answer) -> None:
    async with listening(answer) as port, tier_of(f"redis://127.0.0.1:{port}", timeout_s=SHORT_S) as rig:
        await is_of_no_use(rig)


@pytest.mark.parametrize("name", ["says nothing", "random bytes", "a byte now and then", "errors", "nothing, twice"])
async def test_and_it_is_never_given_a_chance_with_a_password(name: str) -> None:
    async with listening(NO_SERVERS[name]) as port, tier_of(f"redis://:pw@127.0.0.1:{port}/5", timeout_s=SHORT_S) as rig:
        await is_of_no_use(rig)
