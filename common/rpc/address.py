"""Addresses that services listen on and connect to: "host:port" or "unix:/path". Knows what is safe to bind without TLS."""

import fcntl
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from common.errors import StartupError


@dataclass(frozen=True)
class Address:
    """A place to listen on or to connect to.

    Attributes:
        target: what gRPC takes, "host:port" or "unix:/path".
    """

    target: str

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Reads "host:port", ":port" (loopback) or "unix:/path".

        Raises:
            StartupError: text is neither.
        """
        if text.startswith("unix:") and text != "unix:":
            if len(text.encode()) > 107 + len("unix:"):
                raise StartupError(f"address {text!r}: a unix socket path has at most 107 bytes")
            return cls(text)
        host, colon, port = text.rpartition(":")
        is_host = "/" not in host and (":" not in host or (host[0] == "[" and host[-1] == "]"))
        if not colon or not is_host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise StartupError(f"address {text!r}: expected host:port or unix:/path")
        return cls(f"{host or '127.0.0.1'}:{port}")

    @property
    def socket_path(self) -> Path | None:
        """The path of a unix socket; None for TCP."""
        return Path(self.target.removeprefix("unix:")) if self.target.startswith("unix:") else None

    @property
    def is_local(self) -> bool:
        """True when only processes of this host can connect."""
        if self.socket_path is not None:
            return True
        host = self.target.rpartition(":")[0].strip("[]")
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


def lock_socket(path: Path) -> IO[str]:
    """Makes sure that this process alone listens on a unix socket; gRPC itself would steal the path of a running server.

    Returns:
        The lock: keep it open as long as the server runs.

    Raises:
        StartupError: another process listens there, or the folder cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
    except OSError as error:
        raise StartupError(f"cannot listen on unix:{path}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise StartupError(f"cannot listen on unix:{path}: another process listens there") from None
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
