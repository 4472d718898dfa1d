"""Threads that talk to a server, one connection each, and the coroutines that wait for them.

Knows threads, a queue, and who may still write to a caller's memory. Does not know commands, blocks or circuit breakers.

A thread takes the next piece of work straight from the queue, and results come back to the event loop in batches: with a way
through the loop for each block, bandwidth is lost, because the loop and the threads wait for the interpreter lock in turn. While
results keep coming, and work waits in the queue, the loop looks for them by itself every now and then; it is woken only from
sleep, or when the queue is empty. A caller that is cancelled gets its memory back first: work that has not begun never begins;
of work that has, the connection is ended and the end of the work awaited.
"""

import asyncio
import contextlib
import enum
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from kvstore_svc.tiers.redis_connection import RedisConnection

T = TypeVar("T")
_JOIN_S = 1.0
# Longer, and results would be late; shorter, and there would be none. The loop rounds it up to a millisecond or two.
_NAP_S = 0.001


class _Loop(enum.Enum):
    """What the event loop does about results that are there."""

    SLEEPS = "nothing, until it is called"
    NAPS = "it will look soon, by itself"
    IS_CALLED = "it is about to look"


class _Job:
    """One piece of work. The lock of its workers guards all but result.

    Attributes:
        result: what it came to, for the caller; None: it was dropped.
        connection: set while the work runs.
        is_abandoned: nobody wants it any more; it must not begin.
        ended: set by a caller that was cancelled while the work ran.
    """

    __slots__ = ("connection", "ended", "is_abandoned", "result", "work")

    def __init__(self, work: Callable[[RedisConnection], Any], result: "asyncio.Future[Any]"):
        self.work = work
        self.result = result
        self.connection: RedisConnection | None = None
        self.is_abandoned = False
        self.ended: asyncio.Future[None] | None = None


class RedisWorkers:
    """See the module's first lines. Made and used within one event loop.

    Args:
        num_threads: threads, and most connections.
        new_connection: makes one that is not connected yet.
    """

    def __init__(self, num_threads: int, new_connection: Callable[[], RedisConnection]):
        self._new_connection = new_connection
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._finished: deque[tuple[_Job, Any, Exception | None]] = deque()
        # Written by all without a lock: a call too many does no harm, and _deliver sees to it that there is none too few.
        self._loop_state = _Loop.SLEEPS
        self._nap: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()
        # Daemons: one that hangs in a name look-up cannot be ended, and must not keep the process.
        self._threads = [threading.Thread(target=self._serve, name=f"redis-{i}", daemon=True) for i in range(num_threads)]
        for thread in self._threads:
            thread.start()

    async def run(self, work: Callable[[RedisConnection], T]) -> T | None:
        """Does work on a thread, with a connection that is ready.

        Returns:
            What work returned; None: drop_queue dropped it.

        Raises:
            What connecting or work raised.
        """
        job = _Job(work, self._loop.create_future())
        self._jobs.put(job)
        try:
            result: T | None = await job.result
        except asyncio.CancelledError:
            with self._lock:
                job.is_abandoned = True
                if job.connection is not None:
                    job.connection.abort()
                    job.ended = self._loop.create_future()
            while job.ended is not None and not job.ended.done():
                with contextlib.suppress(asyncio.CancelledError):  # the first one is raised
                    await asyncio.wait([job.ended])
            raise
        return result

    def drop_queue(self) -> None:
        """Work that has not begun is not done."""
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is None:
                    self._jobs.put(None)
                    return
                if not job.result.done():
                    job.result.set_result(None)

    async def close(self) -> None:
        """Ends threads and connections. No work is under way."""
        self.drop_queue()
        for _ in self._threads:
            self._jobs.put(None)
        if self._nap is not None:
            self._nap.cancel()
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _serve(self) -> None:
        """A thread's life."""
        connection = self._new_connection()
        while (job := self._jobs.get()) is not None:
            value: Any = None
            error: Exception | None = None
            try:
                if not job.is_abandoned and not connection.is_ready:
                    connection.close()
                    connection = self._new_connection()
                    connection.connect()
                if self._begin(job, connection):
                    value = job.work(connection)
            except Exception as failure:  # the caller's to judge
                error = failure
            with self._lock:
                job.connection = None
            self._finished.append((job, value, error))
            state = self._loop_state
            if state is _Loop.SLEEPS or (state is _Loop.NAPS and self._jobs.empty()):
                self._loop_state = _Loop.IS_CALLED
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                    self._loop.call_soon_threadsafe(self._deliver)
        connection.close()

    def _begin(self, job: _Job, connection: RedisConnection) -> bool:
        with self._lock:
            if not job.is_abandoned:
                job.connection = connection
            return not job.is_abandoned

    def _deliver(self) -> None:
        """Results to their callers, on the event loop; again after a nap, until there are none."""
        if self._nap is not None:
            self._nap.cancel()
            self._nap = None
        # In this order: a thread whose result comes after the look sees that it has to call.
        self._loop_state = _Loop.SLEEPS
        if not self._finished:
            return
        self._loop_state = _Loop.NAPS
        self._nap = self._loop.call_later(_NAP_S, self._deliver)
        while self._finished:
            job, value, error = self._finished.popleft()
            if job.ended is not None:
                job.ended.set_result(None)
            elif job.result.done():
                pass
            elif error is not None:
                job.result.set_exception(error)
            else:
                job.result.set_result(value)
