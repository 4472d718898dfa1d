"""The messages of the file descriptor socket, and the client's side of it. See docs/kv-layout.md.

Knows a socket, a ticket and descriptors. Does not know what lies in the memory behind them.

    client: REQUEST {magic, abi, session_id, ticket}
    store:  REPLY {magic, abi, num_fds, epoch, first_slab, status} + the descriptors, as often as needed
    then:   nothing. The open socket says that the client's process is alive; its end says that the process is gone.
"""

import enum
import os
import socket
import struct
from dataclasses import dataclass
from typing import NamedTuple

from common.errors import NoSharedMemory
from common.shm.slab import SHM_ABI

MAX_FDS_PER_REPLY = 64
TICKET_BYTES = 32
_MAGIC = 0x4F435456
REQUEST = struct.Struct("<IHH36s32s")
REPLY = struct.Struct("<IHHQII")


class HandoverStatus(enum.IntEnum):
    """What the store answers."""

    OK = 0
    BAD_REQUEST = 1
    WRONG_ABI = 2
    BAD_TICKET = 3
    FORBIDDEN_USER = 4


@dataclass(frozen=True)
class HandoverRequest:
    """What a client shows to get the descriptors."""

    session_id: str
    ticket: bytes
    abi: int = SHM_ABI

    def pack(self) -> bytes:
        """The bytes on the socket."""
        return REQUEST.pack(_MAGIC, self.abi, 0, self.session_id.encode(), self.ticket)

    @classmethod
    def unpack(cls, data: bytes) -> "HandoverRequest | None":
        """The request; None: these bytes are none."""
        if len(data) != REQUEST.size:
            return None
        magic, abi, _, session_id, ticket = REQUEST.unpack(data)
        if magic != _MAGIC or not session_id.isascii():
            return None
        return cls(session_id.decode(), ticket, abi)


class HandoverReply(NamedTuple):
    """What the store answers; num_fds descriptors travel beside it."""

    num_fds: int
    epoch: int
    first_slab: int
    status: HandoverStatus

    def pack(self) -> bytes:
        """The bytes on the socket."""
        return REPLY.pack(_MAGIC, SHM_ABI, self.num_fds, self.epoch, self.first_slab, self.status)

    @classmethod
    def unpack(cls, data: bytes) -> "HandoverReply | None":
        """The reply; None: these bytes are none."""
        if len(data) != REPLY.size:
            return None
        magic, abi, num_fds, epoch, first_slab, status = REPLY.unpack(data)
        if magic != _MAGIC or abi != SHM_ABI or status not in HandoverStatus.__members__.values():
            return None
        return cls(num_fds, epoch, first_slab, HandoverStatus(status))


def fetch_descriptors(socket_path: str, request: HandoverRequest, *, num_slabs: int, timeout_s: float) -> "Handover":
    """Connects, shows the ticket and receives all descriptors.

    Raises:
        NoSharedMemory: with the reason; everything that was opened is closed again.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds: list[int] = []
    try:
        connection.settimeout(timeout_s)
        connection.connect(socket_path)
        connection.sendall(request.pack())
        epoch = 0
        while len(fds) < num_slabs:
            data, received, _, _ = socket.recv_fds(connection, REPLY.size, MAX_FDS_PER_REPLY, socket.MSG_CMSG_CLOEXEC)
            fds.extend(received)
            reply = HandoverReply.unpack(data)
            if reply is None:
                raise NoSharedMemory(f"{socket_path} closed the connection or answered something else than a slab hand-over")
            if reply.status is not HandoverStatus.OK:
                raise NoSharedMemory(f"{socket_path} refused the hand-over: {reply.status.name}")
            if reply.num_fds != len(received) or reply.num_fds == 0 or reply.first_slab + reply.num_fds != len(fds):
                raise NoSharedMemory(f"{socket_path}: expected {reply.num_fds} descriptors, received {len(received)}")
            epoch = reply.epoch
    except OSError as error:
        _close_all(connection, fds)
        raise NoSharedMemory(f"{socket_path}: {error}") from error
    except NoSharedMemory:
        _close_all(connection, fds)
        raise
    return Handover(connection, epoch, tuple(fds))


@dataclass(frozen=True)
class Handover:
    """An open socket and the descriptors that came over it."""

    connection: socket.socket
    epoch: int
    fds: tuple[int, ...]

    def close_descriptors(self) -> None:
        """The mappings keep the memory; the descriptors are not needed any more."""
        for fd in self.fds:
            os.close(fd)


def _close_all(connection: socket.socket, fds: list[int]) -> None:
    connection.close()
    for fd in fds:
        os.close(fd)
