"""The tier below disk: blocks in a Redis or Valkey server that hosts may share. One string per block, see redis_value.py.

Knows which commands say what a LowerTier promises. Does not know sockets, threads, shared memory or leases.

Every failure of the server is a miss, see redis_client.py. The server evicts by itself, by its own policy.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import InvalidResponse, ResponseError

from common.clock import Clock
from common.degraded import DegradedPaths
from common.ids import BlockKey
from common.shm.checksum import checksum
from kvstore_svc.core.circuit_breaker import CircuitBreaker
from kvstore_svc.tiers.base import FoundBlock, StoredBlock, TierCounts
from kvstore_svc.tiers.redis_client import RedisClient
from kvstore_svc.tiers.redis_connection import Fetched, RedisConnection
from kvstore_svc.tiers.redis_value import HEADER_BYTES, KEY_PREFIX, pack_header, redis_key, unpack_header

# A hit prolongs the block's life in the server this often: most hits do without a write in the server.
_REFRESH_SHARE = 1 / 8
_SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True)
class RedisConfig:
    """What the tier is told.

    Attributes:
        url: of the server; it may hold a password.
        num_connections: that carry blocks.
        ttl_s: a block that nobody has read for so long is forgotten.
        timeout_s: to connect, and for one block up or down.
        lookup_timeout_s: for one look-up of any number of keys.
        off_s: how long a failing server is left alone.
    """

    url: str
    num_connections: int = 6
    ttl_s: int = 86_400
    timeout_s: float = 0.5
    lookup_timeout_s: float = 0.015
    off_s: float = 5.0


@dataclass(slots=True)
class _Counts:
    """Since the start."""

    num_hits: int = 0
    num_misses: int = 0
    num_writes: int = 0
    num_bad: int = 0


@dataclass(frozen=True, slots=True)
class _ServerGauges:
    """What the server says of itself, of all who use it."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    num_blocks: int = 0
    num_evictions: int = 0


class RedisTier:
    """A LowerTier; made and used within one event loop.

    Raises:
        StartupError: the URL is none. A server that is down is no error.
    """

    name = "redis"

    def __init__(self, config: RedisConfig, *, clock: Clock, degraded: DegradedPaths):
        self._config = config
        self._clock = clock
        self._degraded = degraded
        self._client = RedisClient(
            config.url,
            num_connections=config.num_connections,
            timeout_s=config.timeout_s,
            off_s=config.off_s,
            clock=clock,
            degraded=degraded,
        )
        # Blocks on their way down leave connections to those that somebody waits for.
        self._writers = asyncio.Semaphore(max(1, config.num_connections // 2))
        # A full server refuses writes and is still good for reads.
        self._room = CircuitBreaker(1, config.off_s)
        self._counts = _Counts()
        self._gauges = _ServerGauges()
        self._watching = asyncio.create_task(self._watch_forever())

    async def close(self) -> None:
        """Ends the watch and closes all connections. No call is under way."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._client.close()

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See LowerTier. Keys whose answer is late are not here."""
        commands = [(b"STRLEN", redis_key(key)) for key in keys]
        lengths = await self._client.ask(
            lambda c, deadline_s: c.call(commands, deadline_s=deadline_s, is_partial_good=True), self._config.lookup_timeout_s
        )
        found = [isinstance(length, int) and length > HEADER_BYTES for length in lengths or ()]
        return found + [False] * (len(keys) - len(found))

    async def get(self, key: BlockKey, into: memoryview) -> FoundBlock | None:
        """See LowerTier. A value that cannot be the block is removed from the server."""
        header = memoryview(bytearray(HEADER_BYTES))
        name = redis_key(key)
        if random.random() < _REFRESH_SHARE:
            ttl = b"%d" % self._config.ttl_s
            command = b"*4\r\n$5\r\nGETEX\r\n$%d\r\n%b\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(name), name, len(ttl), ttl)
        else:
            command = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)
        fetched, measured = await self._client.transfer(lambda c, until_s: _fetch(c, command, header, into, until_s)) or (
            None,
            b"",
        )
        stored = unpack_header(header, key) if fetched is Fetched.HIT else None
        if stored is not None and stored.layout.block_bytes == len(into):
            self._counts.num_hits += 1
            return FoundBlock(stored, measured)
        self._counts.num_misses += 1
        if fetched in (Fetched.HIT, Fetched.BAD):
            self._counts.num_bad += 1
            self._degraded.note(
                "kvstore_redis_bad_value", f"the value of block {key.hex()} is none of this key and length; removed"
            )
            await self.evict(key)
        return None

    async def put(self, block: StoredBlock, data: memoryview) -> bool:
        """See LowerTier. A key that is here already gets its whole life again."""
        async with self._writers:
            is_probe = self._room.begin_probe(self._clock.now())
            if not (self._room.is_closed or is_probe):
                return False
            reply: Any = None
            try:
                reply = await self._client.transfer(lambda c, deadline_s: self._write(c, block, data, deadline_s))
            finally:
                is_refused = isinstance(reply, ResponseError)
                if is_probe:
                    self._room.end_probe(not is_refused, self._clock.now())
                else:
                    self._room.record(not is_refused, self._clock.now())
        if is_refused:
            self._degraded.note("kvstore_redis_refuses_writes", str(reply))
        elif reply is not None:
            self._degraded.clear("kvstore_redis_refuses_writes")
            self._counts.num_writes += reply == b"OK"
        return reply is not None and not is_refused

    async def evict(self, key: BlockKey) -> bool:
        """See LowerTier."""
        return await self._remove([redis_key(key)]) > 0

    async def clear(self, fingerprint: bytes | None) -> int:
        """See LowerTier. For all hosts that use the server."""
        cursor, num_removed = b"0", 0
        while True:
            scan = (b"SCAN", cursor, b"MATCH", KEY_PREFIX + b"*", b"COUNT", b"%d" % _SCAN_COUNT)
            replies = await self._client.call(scan)
            if replies is None or not isinstance(replies[0], list):
                return num_removed
            cursor, names = replies[0]
            num_removed += await self._remove(await self._of_layout(names, fingerprint))
            if cursor == b"0":
                return num_removed

    def counts(self) -> TierCounts:
        """See LowerTier. Sizes, blocks and evictions are the server's own, a moment old, of all who use it."""
        return TierCounts(
            capacity_bytes=self._gauges.capacity_bytes,
            used_bytes=self._gauges.used_bytes,
            num_blocks=self._gauges.num_blocks,
            num_hits=self._counts.num_hits,
            num_misses=self._counts.num_misses,
            num_evictions=self._gauges.num_evictions,
            num_writes=self._counts.num_writes,
            num_bad=self._counts.num_bad,
            unavailable_reason=self._client.unavailable_reason,
        )

    def _write(self, connection: RedisConnection, block: StoredBlock, data: memoryview, deadline_s: float) -> Any:
        """b"OK": written; 1: it was here; a ResponseError: refused. Runs on a thread."""
        key, ttl = redis_key(block.key), b"%d" % self._config.ttl_s
        (is_here,) = connection.call([(b"EXPIRE", key, ttl)], deadline_s=deadline_s)
        if is_here == 1 or isinstance(is_here, ResponseError):
            return is_here
        header = pack_header(block)
        before = b"*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (len(key), key, len(header) + len(data), header)
        after = b"\r\n$2\r\nNX\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
        reply = connection.store(before, data, after, deadline_s=deadline_s)
        if reply is None:
            return 1  # another host was faster
        if reply != b"OK" and not isinstance(reply, ResponseError):
            raise InvalidResponse(f"SET is answered by {str(reply)[:100]!r}")
        return reply

    async def _remove(self, names: Sequence[bytes]) -> int:
        replies = await self._client.call((b"UNLINK", *names)) if names else None
        return replies[0] if replies is not None and isinstance(replies[0], int) else 0

    async def _of_layout(self, names: Sequence[bytes], fingerprint: bytes | None) -> list[bytes]:
        """Those of names whose header has a fingerprint; None: all."""
        if fingerprint is None:
            return list(names)
        last = b"%d" % (HEADER_BYTES - 1)
        headers = await self._client.call(*((b"GETRANGE", name, b"0", last) for name in names)) or []
        chosen = []
        for name, header in zip(names, headers, strict=False):
            with contextlib.suppress(ValueError):  # a name that only begins like ours
                key = BlockKey(bytes.fromhex(name.removeprefix(KEY_PREFIX).decode()))
                stored = unpack_header(header, key) if isinstance(header, bytes) else None
                if stored is not None and stored.layout.fingerprint == fingerprint:
                    chosen.append(name)
        return chosen

    async def _watch_forever(self) -> None:
        """Finds out by itself that the server is gone, or back, and reads its gauges."""
        every_s = min(1.0, self._config.off_s / 4)
        while True:
            replies = await self._client.look((b"INFO", b"memory"), (b"INFO", b"stats"), (b"DBSIZE",))
            if replies is not None:
                self._gauges = _gauges(*replies)
            await asyncio.sleep(every_s)


def _fetch(
    connection: RedisConnection, command: bytes, header: memoryview, into: memoryview, deadline_s: float
) -> tuple[Fetched, bytes]:
    """Receives a block and hashes it where it came in. Runs on a thread."""
    fetched = connection.fetch(command, header, into, deadline_s=deadline_s)
    return fetched, checksum(into) if fetched is Fetched.HIT else b""


def _gauges(memory: object, stats: object, num_keys: object) -> _ServerGauges:
    """Gauges out of what INFO and DBSIZE answer; 0 where the server does not tell."""
    fields: dict[str, str] = {}
    for text in (memory, stats):
        if isinstance(text, bytes):
            fields |= dict(line.split(":", 1) for line in text.decode("utf-8", "replace").split("\r\n") if ":" in line)

    def number(name: str) -> int:
        value = fields.get(name, "")
        return int(value) if value.isdigit() else 0

    return _ServerGauges(
        capacity_bytes=number("maxmemory"),
        used_bytes=number("used_memory"),
        num_blocks=num_keys if isinstance(num_keys, int) else 0,
        num_evictions=number("evicted_keys"),
    )
