"""A way past the front for one session: a socket on which a scheduler of this host and user may connect once.

Knows the socket and who may use it; docs/decisions/0007 says why there is one. Does not know frames.
"""

import asyncio
import logging
import os
import shutil
import socket
import struct
import tempfile
from pathlib import Path

from common.shm.host import host_id
from octavo.executor.v1 import executor_service_pb2 as pb

log = logging.getLogger(__name__)
_UCRED = struct.Struct("iII")
NO_LINE = pb.LocalLine(host_id=host_id())
"""For a scheduler of this host: there should be a line, and there is none."""


class LineOffer:
    """Listens in a folder of its own that nobody else can enter.

    Args:
        folder: to make that folder in; None: the system's temporary one.

    Raises:
        OSError: the folder cannot be written, or the path is too long for a socket.
    """

    def __init__(self, folder: Path | None):
        self._folder = Path(tempfile.mkdtemp(prefix="octavo-line-", dir=folder))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._path = str(self._folder / "line")
        try:
            self._listener.bind(self._path)
            self._listener.listen(4)
        except OSError:
            self.close()
            raise

    @property
    def message(self) -> pb.LocalLine:
        """For the scheduler."""
        return pb.LocalLine(host_id=host_id(), socket_path=self._path)

    async def accept(self) -> socket.socket:
        """The connection of a process of this user."""
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            uid = _UCRED.unpack(credentials)[1]
            if uid == os.getuid():
                connection.setblocking(True)
                return connection
            log.warning("a line was refused: process of user %d", uid)
            connection.close()

    def close(self) -> None:
        """Gives the path back; a connection that was accepted stays."""
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
