"""The socket that hands slabs to clients and tells when a client's process is gone. See docs/kv-layout.md.

Knows tickets, users and connections. What a session holds, and what happens to it, is decided by the core.
"""

import asyncio
import errno
import hmac
import logging
import os
import secrets
import socket
import stat
import struct
from pathlib import Path
from typing import IO

from common.clock import Clock
from common.errors import StartupError
from common.ids import Epoch, SessionId
from common.rpc.address import lock_socket
from common.shm.handover import (
    MAX_FDS_PER_REPLY,
    REQUEST,
    TICKET_BYTES,
    HandoverReply,
    HandoverRequest,
    HandoverStatus,
)
from common.shm.slab import SHM_ABI
from kvstore_svc.core.block_store import BlockStore

log = logging.getLogger(__name__)
TICKET_TTL_S = 10.0
_REQUEST_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 1024
_UCRED = struct.Struct("iII")


class HandoverServer:
    """Listens on a unix socket.

    Args:
        path: of the socket.
        allowed_uids: users whose processes get descriptors.
        clock: for the age of tickets.
    """

    def __init__(self, path: Path, allowed_uids: frozenset[int], clock: Clock):
        self.path = path
        self._allowed_uids = allowed_uids
        self._clock = clock
        self._tickets: dict[SessionId, tuple[bytes, float]] = {}
        self._connections: dict[SessionId, socket.socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock: IO[str] | None = None
        self._listener: socket.socket | None = None

    def bind(self) -> None:
        """Takes the path.

        Raises:
            StartupError: another process listens there, or the folder is not ours alone.
        """
        if len(os.fsencode(self.path)) > 107:
            raise StartupError(f"--shm-socket {self.path}: a unix socket path has at most 107 bytes")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = self.path.parent.stat()
        except OSError as error:
            raise StartupError(f"--shm-socket {self.path}: {error}") from error
        # First of all: in another user's folder even the lock file may be a trap.
        if folder.st_uid not in (os.getuid(), 0) or (folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX):
            raise StartupError(f"--shm-socket {self.path}: its folder belongs to another user or can be written by everybody")
        self._lock = lock_socket(self.path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        try:
            self.path.unlink(missing_ok=True)
            self._listener.bind(os.fspath(self.path))
            self.path.chmod(0o600 if self._allowed_uids == {os.getuid()} else 0o666)
            self._listener.listen(64)
        except OSError as error:
            raise StartupError(f"--shm-socket {self.path}: {error}") from error

    def ticket(self, session_id: SessionId) -> bytes:
        """A one-time ticket for a session's hand-over, good for TICKET_TTL_S."""
        now = self._clock.now()
        self._tickets = {s: (t, until) for s, (t, until) in self._tickets.items() if until > now}
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._tickets[session_id] = (ticket, now + TICKET_TTL_S)
        return ticket

    def end_connection(self, session_id: SessionId) -> None:
        """Ends the socket of a session that has closed in good order."""
        connection = self._connections.get(session_id)
        if connection is not None:
            connection.shutdown(socket.SHUT_RDWR)

    async def serve(self, store: BlockStore, fds: list[int]) -> None:
        """Answers clients until cancelled."""
        assert self._listener is not None, "bind comes first"
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    raise
                log.error("hand-over socket: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._tasks) >= _MAX_CONNECTIONS:
                log.warning("hand-over socket: more than %d connections; one was refused", _MAX_CONNECTIONS)
                connection.close()
                continue
            task = asyncio.create_task(self._attend(connection, store, fds))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends all connections and gives the path back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self.path.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()

    async def _attend(self, connection: socket.socket, store: BlockStore, fds: list[int]) -> None:
        """One client, from its request to its end."""
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        session_id: SessionId | None = None
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                data = await loop.sock_recv(connection, REQUEST.size + 1)
            request = HandoverRequest.unpack(data)
            status = self._check(connection, request, store)
            if status is not HandoverStatus.OK or request is None:
                log.warning("hand-over refused: %s", status.name)
                connection.send(HandoverReply(0, store.epoch, 0, status).pack())
                return
            session_id = SessionId(request.session_id)
            self._connections[session_id] = connection
            store.socket_opened(session_id)
            _send_descriptors(connection, store.epoch, fds)
            # Nothing else is ever sent: this returns when the client's process closes the socket, or is gone.
            await loop.sock_recv(connection, 1)
        except (OSError, TimeoutError) as error:
            log.warning("hand-over connection ended: %s", error or "no request in time")
        finally:
            if session_id is not None:
                del self._connections[session_id]
                store.socket_closed(session_id)
            connection.close()

    def _check(self, connection: socket.socket, request: HandoverRequest | None, store: BlockStore) -> HandoverStatus:
        if request is None:
            return HandoverStatus.BAD_REQUEST
        _, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid not in self._allowed_uids:
            return HandoverStatus.FORBIDDEN_USER
        if request.abi != SHM_ABI:
            return HandoverStatus.WRONG_ABI
        session_id = SessionId(request.session_id)
        ticket, valid_until = self._tickets.pop(session_id, (b"", 0.0))
        is_good = hmac.compare_digest(ticket, request.ticket) and self._clock.now() < valid_until
        return HandoverStatus.OK if is_good and session_id in store.sessions else HandoverStatus.BAD_TICKET


def _send_descriptors(connection: socket.socket, epoch: Epoch, fds: list[int]) -> None:
    for first in range(0, len(fds), MAX_FDS_PER_REPLY):
        batch = fds[first : first + MAX_FDS_PER_REPLY]
        reply = HandoverReply(len(batch), epoch, first, HandoverStatus.OK)
        socket.send_fds(connection, [reply.pack()], batch)
