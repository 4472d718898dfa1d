"""Threads that wait for the disk. Knows that they use their caller's memory; not what they do with it."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DiskThreads:
    """A pool.

    Args:
        num_threads: calls of the system that may wait at the same time.
    """

    def __init__(self, num_threads: int):
        self._pool = ThreadPoolExecutor(num_threads, "disk")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs function in a thread; who is cancelled meanwhile still waits for it, because it uses the caller's memory."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):  # once is enough
                    await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # it is nobody's any more
            raise

    def close(self) -> None:
        """Waits for all threads."""
        self._pool.shutdown()
