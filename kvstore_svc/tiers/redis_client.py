"""One server as coroutines: deadlines, and the circuit breaker that leaves a failing server alone.

Knows when to give up, and whom to tell. Does not know sockets, commands or blocks.

Blocks and small questions have connections of their own, so that a look-up does not wait behind blocks. The calls of this
client never raise for a server or a network: they are None.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from redis.exceptions import InvalidResponse

from common.clock import Clock
from common.degraded import DegradedPaths
from kvstore_svc.core.circuit_breaker import CircuitBreaker
from kvstore_svc.tiers.redis_connection import FAILURES, RedisConnection, connection_pool
from kvstore_svc.tiers.redis_workers import RedisWorkers

T = TypeVar("T")
_MAX_FAILURES = 5
# Work sees its deadline by itself; this much later nobody waits any more.
_GRACE_S = 0.05


class RedisClient:
    """See the module's first lines.

    Args:
        url: of the server.
        num_connections: that carry blocks; there is one more for everything else.
        timeout_s: to connect, and for one transfer.
        off_s: how long a failing server is left alone.
        clock: of deadlines and of the circuit breaker.
        degraded: where failures are said.

    Raises:
        StartupError: the URL is none. A server that is down is no error.
    """

    def __init__(self, url: str, *, num_connections: int, timeout_s: float, off_s: float, clock: Clock, degraded: DegradedPaths):
        self.timeout_s = timeout_s
        self._clock = clock
        self._degraded = degraded
        pool = connection_pool(url, timeout_s)
        self._transfers = RedisWorkers(num_connections, lambda: RedisConnection(pool, timeout_s, clock))
        self._questions = RedisWorkers(1, lambda: RedisConnection(pool, timeout_s, clock))
        self._breaker = CircuitBreaker(_MAX_FAILURES, off_s)
        self._reason = ""

    @property
    def unavailable_reason(self) -> str:
        """Why the server is left alone for the moment; empty: it is not."""
        return "" if self._breaker.is_closed else self._reason

    async def transfer(self, work: Callable[[RedisConnection, float], T]) -> T | None:
        """Moves one block. Waits for its turn as long as the caller does.

        Args:
            work: called on a thread with a connection and a deadline; it may use the caller's memory.

        Returns:
            What work returned; None: the server failed or is left alone.
        """
        if not self._breaker.is_closed:
            return None
        try:
            result = await self._transfers.run(lambda c: work(c, self._clock.now() + self.timeout_s))
        except FAILURES as error:
            self._failed(error)
            return None
        self._succeeded()
        return result

    async def ask(self, work: Callable[[RedisConnection, float], T], timeout_s: float) -> T | None:
        """The same for something small, with the wait for its turn being part of timeout_s."""
        return await self._ask(work, timeout_s) if self._breaker.is_closed else None

    async def call(self, *commands: Sequence[bytes]) -> list[Any] | None:
        """Small commands and a reply to each; None: the server failed or is left alone."""
        return await self.ask(lambda c, deadline_s: c.call(commands, deadline_s=deadline_s), self.timeout_s)

    async def look(self, *commands: Sequence[bytes]) -> list[Any] | None:
        """The same behind a PING, whose answer must be right; a server that is left alone gets its probe.

        Returns:
            Replies to commands.
        """
        is_probe = self._breaker.begin_probe(self._clock.now())
        if not (self._breaker.is_closed or is_probe):
            return None
        replies = None
        try:
            replies = await self._ask(
                lambda c, deadline_s: _behind_pong(c.call([(b"PING",), *commands], deadline_s=deadline_s)), self.timeout_s
            )
        finally:
            if is_probe:
                self._breaker.end_probe(replies is not None, self._clock.now())
        if replies is not None:
            self._succeeded()
        return replies

    async def close(self) -> None:
        """Closes all connections. No call is under way."""
        await self._transfers.close()
        await self._questions.close()

    async def _ask(self, work: Callable[[RedisConnection, float], T], timeout_s: float) -> T | None:
        deadline_s = self._clock.now() + timeout_s
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                result = await self._questions.run(lambda c: work(c, deadline_s))
        except FAILURES as error:
            self._failed(error)
            return None
        self._succeeded()
        return result

    def _succeeded(self) -> None:
        if self._breaker.is_closed:
            self._breaker.record(True, self._clock.now())
            self._degraded.clear("kvstore_redis_unavailable")

    def _failed(self, error: Exception) -> None:
        self._reason = str(error) or type(error).__name__
        self._degraded.note("kvstore_redis_unavailable", self._reason)
        self._breaker.record(False, self._clock.now())
        if not self._breaker.is_closed:
            self._transfers.drop_queue()


def _behind_pong(replies: list[Any]) -> list[Any]:
    if replies[0] != b"PONG":
        raise InvalidResponse(f"PING is answered by {str(replies[0])[:100]!r}")
    return replies[1:]
