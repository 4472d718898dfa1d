"""A client's session and what it holds. Data only; the store decides."""

import enum
from dataclasses import dataclass, field

from common.ids import LeaseId, SessionId
from kvstore_svc.core.block import Block, Layout


class LeaseKind(enum.Enum):
    """What the holder of a lease may do with the block's bytes."""

    WRITE = "write"
    READ = "read"


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one session to write a reserved block, or to read a committed one."""

    lease_id: LeaseId
    session_id: SessionId
    kind: LeaseKind
    block: Block


@dataclass(slots=True, eq=False)
class Session:
    """One client.

    Attributes:
        last_seen_s: time of its last heartbeat or call.
        transport, transport_reason: what the client reported, for people.
        has_socket: its process maps the slabs and is known to live; the end of the socket is the end of the process.
        fenced_at_s: when it stopped to count as alive; None while it does. A fenced session has a socket: without one
            it would be gone.
        is_leaked: it has been fenced for too long.
    """

    session_id: SessionId
    client_id: str
    layout: Layout
    last_seen_s: float
    transport: str = ""
    transport_reason: str = ""
    has_socket: bool = False
    fenced_at_s: float | None = None
    is_leaked: bool = False
    leases: dict[LeaseId, Lease] = field(default_factory=dict)

    @property
    def is_fenced(self) -> bool:
        """Whether its calls are refused."""
        return self.fenced_at_s is not None
