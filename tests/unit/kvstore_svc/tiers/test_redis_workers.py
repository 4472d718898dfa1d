"""Threads that do the work of coroutines: every result arrives, whatever the other threads do meanwhile."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import cast

import pytest

from kvstore_svc.tiers.redis_connection import RedisConnection
from kvstore_svc.tiers.redis_workers import RedisWorkers


class NoConnection:
    """One that is always ready; work does not use it."""

    is_ready = True

    def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
async def workers() -> AsyncIterator[RedisWorkers]:
    """Two threads."""
    found = RedisWorkers(2, lambda: cast(RedisConnection, NoConnection()))
    yield found
    await found.close()


async def test_each_gets_its_own_result(workers: RedisWorkers) -> None:
    found = await asyncio.gather(*(workers.run(lambda c, n=n: n) for n in range(2000)))  # type: ignore[misc]

    assert found == list(range(2000))


async def test_results_do_not_wait_for_work_that_hangs_nor_for_work_behind_it(workers: RedisWorkers) -> None:
    may_end = threading.Event()
    quick = [asyncio.create_task(workers.run(lambda c, n=n: n)) for n in range(10)]  # type: ignore[misc]
    slow = [asyncio.create_task(workers.run(lambda c: may_end.wait())) for _ in range(4)]

    assert await asyncio.gather(*quick) == list(range(10))

    assert not any(task.done() for task in slow)
    may_end.set()
    assert await asyncio.gather(*slow) == [True] * 4


async def test_who_waits_for_each_result_before_the_next_gets_them_all(workers: RedisWorkers) -> None:
    assert [await workers.run(lambda c, n=n: n) for n in range(200)] == list(range(200))  # type: ignore[misc]


async def test_an_error_is_the_callers_and_the_thread_goes_on(workers: RedisWorkers) -> None:
    def fail(connection: RedisConnection) -> None:
        raise ConnectionResetError("gone")

    for _ in range(3):
        with pytest.raises(ConnectionResetError, match="gone"):
            await workers.run(fail)

    assert await workers.run(lambda c: 1) == 1
