"""The Redis tier and a real server that works: what goes down comes up, and what is not the block does not."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from common.errors import StartupError
from common.shm.checksum import checksum
from kvstore_svc.core.block import Layout
from kvstore_svc.tiers.base import StoredBlock
from kvstore_svc.tiers.redis_value import HEADER_BYTES, pack_header, redis_key
from tests.integration.kvstore_svc.redis_rig import BLOCK_BYTES, LAYOUT, Rig, data_of, tier_of
from tests.integration.kvstore_svc.redis_server import RedisServer, listening, passing_on_to
from tests.integration.kvstore_svc.store_process import FINGERPRINT, key
from tests.unit.common.rpc.certificate import write_certificate

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


@pytest.fixture(scope="module")
def server_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with closing(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture
def server(server_of_module: RedisServer) -> RedisServer:
    """Empty."""
    server_of_module.client.flushall()
    return server_of_module


@pytest.fixture
async def rig(server: RedisServer) -> AsyncIterator[Rig]:
    async with tier_of(server.url) as found:
        yield found


async def test_what_was_put_comes_back_and_what_was_not_is_a_miss(rig: Rig, server: RedisServer) -> None:
    assert await rig.put(1, 2) == [True, True]

    assert await rig.get(1) == data_of(1)
    assert await rig.get(2) == data_of(2)
    assert await rig.get(3) is None
    assert await rig.tier.contains([key(1), key(3), key(2)]) == [True, False, True]
    counts = rig.tier.counts()
    assert (counts.num_writes, counts.num_hits, counts.num_misses, counts.num_bad) == (2, 2, 1, 0)
    assert all(0 < server.client.ttl(name) <= 1000 for name in server.names())
    assert len(server.names()) == 2


@pytest.mark.parametrize("num_bytes", [1, 7, 4096, 1 << 20, (5 << 20) + 3])
async def test_blocks_of_any_size(rig: Rig, num_bytes: int) -> None:
    assert await rig.put(1, layout=Layout(FINGERPRINT, num_bytes)) == [True]

    assert await rig.get(1, num_bytes) == data_of(1, num_bytes)


async def test_many_at_once_each_get_their_own(rig: Rig) -> None:
    await rig.put(*range(50))

    found = await asyncio.gather(*(rig.get(number) for number in [*range(60)] * 4))

    assert found == [data_of(number) if number < 50 else None for number in range(60)] * 4


async def test_a_lookup_of_thousands(rig: Rig) -> None:
    await rig.put(3, 4999)

    found = await rig.tier.contains([key(number) for number in range(5000)])

    assert [number for number, is_here in enumerate(found) if is_here] == [3, 4999]
    assert await rig.tier.contains([]) == []


async def test_a_block_that_is_here_is_left_alone_and_lives_longer(rig: Rig, server: RedisServer) -> None:
    await rig.put(1)
    server.client.expire(redis_key(key(1)), 50)

    assert await rig.put(1) == [True]

    assert server.client.ttl(redis_key(key(1))) > 50
    assert rig.tier.counts().num_writes == 1


async def test_hits_prolong_a_blocks_life(rig: Rig, server: RedisServer) -> None:
    await rig.put(1)
    server.client.expire(redis_key(key(1)), 50)

    for _ in range(2000):  # one in eight does
        await rig.get(1)
        if server.client.ttl(redis_key(key(1))) > 50:
            return
    pytest.fail("no hit prolonged it")


async def test_a_block_dies_of_age(server: RedisServer) -> None:
    async with tier_of(server.url, ttl_s=1) as rig:
        await rig.put(1)
        async with asyncio.timeout(20):
            while await rig.tier.contains([key(1)]) == [True]:
                await asyncio.sleep(0.05)

        assert await rig.get(1) is None


async def test_a_hosts_blocks_are_anothers(rig: Rig, server: RedisServer) -> None:
    await rig.put(1)

    async with tier_of(server.url) as other:
        assert await other.get(1) == data_of(1)
        assert await other.put(1) == [True]
        assert other.tier.counts().num_writes == 0


HEADER = pack_header(StoredBlock(key(1), LAYOUT, checksum(data_of(1))))
BAD_VALUES = {
    "empty": b"",
    "garbage of the right length": b"g" * (HEADER_BYTES + BLOCK_BYTES),
    "cut off in the header": HEADER[:50],
    "header alone": HEADER,
    "cut off in the block": HEADER + data_of(1)[:-1],
    "too long": HEADER + data_of(1) + b"x",
    "very long": HEADER + data_of(1) * 40,
    "other magic": b"?" + HEADER[1:] + data_of(1),
    "newer version": HEADER[:4] + b"\x02" + HEADER[5:] + data_of(1),
    "other length in the header": pack_header(StoredBlock(key(1), Layout(FINGERPRINT, 77), checksum(data_of(1)))) + data_of(1),
    "another block": pack_header(StoredBlock(key(2), LAYOUT, checksum(data_of(2)))) + data_of(2),
}


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES.keys())
async def test_a_value_that_cannot_be_the_block_is_a_miss_and_is_removed(rig: Rig, server: RedisServer, value: bytes) -> None:
    server.client.set(redis_key(key(1)), value)
    await rig.put(2)

    assert await rig.get(1) is None

    assert rig.tier.counts().num_bad == 1
    assert server.names() == [redis_key(key(2))]
    assert await rig.get(2) == data_of(2)
    assert rig.reason == ""
    assert rig.degraded.counts == {"kvstore_redis_bad_value": 1}


async def test_a_value_of_another_type_is_a_miss_and_is_removed(rig: Rig, server: RedisServer) -> None:
    server.client.rpush(redis_key(key(1)), b"x")

    assert await rig.tier.contains([key(1)]) == [False]
    assert await rig.get(1) is None

    assert server.names() == []
    assert rig.tier.counts().num_bad == 1


async def test_a_block_of_another_size_is_a_miss(rig: Rig) -> None:
    await rig.put(1)

    assert await rig.get(1, BLOCK_BYTES + 1) is None


async def test_evict_and_clear_forget_blocks_and_nothing_else(rig: Rig, server: RedisServer) -> None:
    other_layout = Layout(b"o" * 32, 1000)
    server.client.set(b"kv:1:not-a-block", b"x")
    server.client.set(b"somebody else's", b"x")
    await rig.put(*range(5))
    await rig.put(*range(100, 103), layout=other_layout)

    assert await rig.tier.evict(key(0))
    assert not await rig.tier.evict(key(0))
    assert await rig.tier.clear(other_layout.fingerprint) == 3
    assert await rig.tier.contains([key(n) for n in (1, 4, 100, 102)]) == [True, True, False, False]
    assert await rig.tier.clear(None) == 5
    assert server.names() == [b"somebody else's"]


async def until_gauges(rig: Rig, num_blocks: int) -> None:
    async with asyncio.timeout(20):
        while rig.tier.counts().num_blocks != num_blocks:
            await asyncio.sleep(0.01)


async def test_gauges_are_the_servers_own(rig: Rig) -> None:
    await rig.put(1, 2)

    await until_gauges(rig, 2)
    assert rig.tier.counts().used_bytes > 2 * BLOCK_BYTES


async def test_the_password_of_the_url_is_used(tmp_path: Path) -> None:
    with closing(RedisServer(tmp_path, password="s3cret")) as server:
        async with tier_of(server.url) as rig:
            assert await rig.put(1) == [True]
            assert await rig.get(1) == data_of(1)


async def test_the_commands_that_a_user_needs_are_those_of_the_documentation(server: RedisServer) -> None:
    (commands,) = re.findall(r"needs `([^`]*)`", " ".join(OPERATIONS.read_text().split()))
    gauges = ("+info", "+dbsize")
    server.client.acl_setuser(
        "octavo", enabled=True, passwords=["+pw"], keys=["kv:*"], commands=[*commands.split(), *gauges], reset=True
    )
    async with tier_of(f"unix://octavo:pw@{server.socket}") as rig:
        assert await rig.put(1) == [True]
        for _ in range(50):  # some of them prolong the block's life
            assert await rig.get(1) == data_of(1)
        assert await rig.tier.contains([key(1)]) == [True]
        await until_gauges(rig, 1)
        assert await rig.tier.clear(FINGERPRINT) == 1
        assert not rig.degraded.counts


async def test_tcp_and_a_database_by_number(server: RedisServer) -> None:
    async with listening(passing_on_to(server.socket)) as port, tier_of(f"redis://127.0.0.1:{port}/3") as rig:
        assert await rig.put(1) == [True]
        assert await rig.get(1) == data_of(1)
        assert server.names() == []


async def test_tls(server: RedisServer, tmp_path: Path) -> None:
    cert, private_key = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, private_key)
    async with listening(passing_on_to(server.socket), tls=context) as port:
        url = f"rediss://localhost:{port}/0"
        async with tier_of(f"{url}?ssl_ca_certs={cert}") as rig:
            assert await rig.put(1, 2, 3) == [True] * 3
            assert await asyncio.gather(*(rig.get(n) for n in (1, 2, 3) * 10)) == [data_of(n) for n in (1, 2, 3) * 10]
        async with tier_of(url) as rig:
            assert await rig.get(1) is None
            assert rig.degraded.counts["kvstore_redis_unavailable"] > 0


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379",
        "http://localhost",
        "redis://localhost:notaport",
        "redis://:pw@localhost?no_such_option=1",
        "redis://:pw@[",
    ],
)
async def test_a_url_that_is_none_is_said_at_the_start_without_its_password(url: str) -> None:
    with pytest.raises(StartupError, match="--redis-url") as caught:
        async with tier_of(url):
            pass
    assert "pw" not in caught.value.message
