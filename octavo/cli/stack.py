"""A server's processes together: started, watched, started again when one dies, stopped in reverse order.

Knows how to start a process and to ask for its health. Does not know what the services are.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from common.errors import StartupError
from common.rpc.address import Address
from common.rpc.channel import aio_channel
from octavo.cli.child import Child, LineSink
from octavo.cli.services import Service

ProgressSink = Callable[[str], None]
"""Called with one sentence about what has been reached."""


class Stack:
    """Processes in the order of their start.

    Args:
        list_of_services: what to start.
        on_line: their output.
        on_progress: what has been reached, for people.
        start_timeout_s: longest wait for the health of one of them.
        grace_s: what each gets to finish after SIGTERM.
        shortest_life_s: one that ends sooner than this after its start is not started again.
    """

    def __init__(
        self,
        list_of_services: Sequence[Service],
        on_line: LineSink,
        on_progress: ProgressSink,
        *,
        start_timeout_s: float = 600.0,
        grace_s: float = 15.0,
        shortest_life_s: float = 10.0,
    ):
        self._services = list(list_of_services)
        self._on_line = on_line
        self._on_progress = on_progress
        self._start_timeout_s = start_timeout_s
        self._grace_s = grace_s
        self._shortest_life_s = shortest_life_s
        self._started_at: dict[str, float] = {}
        self.children: dict[str, Child] = {}

    async def start(self) -> None:
        """Starts all at once and waits until each serves.

        Raises:
            StartupError: one ended, or took too long; the message carries its last words.
        """
        for service in self._services:
            await self._spawn(service)
        for service in self._services:
            ready = _is_listening(service.address) if service.is_secure else _is_serving(service.address)
            await self.wait_for(service.name, ready)
            seconds = time.monotonic() - self._started_at[service.name]
            self._on_progress(f"{service.name} is ready ({seconds:.1f} s)")

    async def wait_for(self, name: str, ready: Coroutine[Any, Any, None]) -> None:
        """Waits for something that a process is to reach at the start.

        Raises:
            StartupError: one of the processes ended first, or it took too long.
        """
        task = asyncio.ensure_future(ready)
        exits = [child.exited for child in self.children.values()]
        try:
            await asyncio.wait([task, *exits], timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for child in self.children.values():
                if child.exited.done():
                    raise StartupError(_last_words(child, "ended at its start"))
            if not task.done():
                last = self.children[name].last_words()
                raise StartupError(f"{name} is not ready after {self._start_timeout_s:.0f} s; its last words: {last}")
            task.result()
        finally:
            task.cancel()

    async def watch(self) -> None:
        """Starts a process that ends again, the others go on. Returns never.

        Raises:
            StartupError: a process ended within shortest_life_s of its start.
        """
        while True:
            await asyncio.wait([child.exited for child in self.children.values()], return_when=asyncio.FIRST_COMPLETED)
            for service in self._services:
                child = self.children[service.name]
                if not child.exited.done():
                    continue
                if time.monotonic() - self._started_at[service.name] < self._shortest_life_s:
                    raise StartupError(_last_words(child, "ended again and again"))
                self._on_progress(f"{service.name} ended ({child.ending()}); starting it again")
                child.kill()
                await self._spawn(service)
                self._on_progress(f"{service.name} runs again")

    async def stop(self) -> None:
        """Ends all, the last one started first. Cancelled: ends the rest by SIGKILL."""
        try:
            for name, child in reversed(self.children.items()):
                if not child.exited.done():
                    code = await child.stop(self._grace_s)
                    self._on_progress(f"{name} stopped" if code == 0 else f"{name} stopped (exit code {code})")
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends all at once, by SIGKILL."""
        for child in self.children.values():
            child.kill()

    async def _spawn(self, service: Service) -> None:
        self._started_at[service.name] = time.monotonic()
        self.children[service.name] = await Child.start(
            service.name, service.arguments, self._on_line, environment=service.environment
        )


async def run_to_end(
    name: str, arguments: Sequence[str], on_line: LineSink, *, environment: Mapping[str, str] | None = None
) -> str:
    """Runs a process that is to end by itself.

    Returns:
        The last line of its standard output.

    Raises:
        StartupError: it failed, or printed nothing.
    """
    child = await Child.start(name, arguments, on_line, environment=environment)
    try:
        code = await asyncio.shield(child.exited)
    finally:
        child.kill()
    if code != 0:
        raise StartupError(_last_words(child, "failed"))
    if not child.last_stdout_line:
        raise StartupError(f"{name} printed no result")
    return child.last_stdout_line


async def _is_serving(address: Address) -> None:
    """Returns when the server there reports SERVING."""
    async with aio_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                response = await check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(0.05)


async def _is_listening(address: Address) -> None:
    """Returns when something accepts connections there."""
    while True:
        with contextlib.suppress(OSError):
            if address.socket_path is not None:
                _, writer = await asyncio.open_unix_connection(address.socket_path)
            else:
                host, _, port = address.target.rpartition(":")
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            return
        await asyncio.sleep(0.05)


def _last_words(child: Child, what: str) -> str:
    return f"{child.name} {what} ({child.ending()})"
