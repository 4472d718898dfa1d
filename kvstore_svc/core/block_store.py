"""The store's index: which block is where, who may write it, who reads it, what goes first when room is needed.

Knows keys, places, leases and sessions. Does not know bytes, sockets, lower tiers or what time it is.

Rules:
    - A key is readable only between its commit and its eviction.
    - A place is given out only when no lease is on it: reading and writing clients are never overwritten.
    - What a session holds comes back when it closes, when its socket ends, or, without a socket, when it is silent too long.
      A silent session with a socket is fenced: its process may still write, so its reservations stay in quarantine.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from common.errors import StaleEpoch
from common.ids import BlockKey, Epoch, LeaseId, SessionId
from kvstore_svc.core.block import Block, BlockState, Layout
from kvstore_svc.core.event_log import EventKind, EventLog
from kvstore_svc.core.place import PlaceTable
from kvstore_svc.core.session import Lease, LeaseKind, Session

TIER = "shm"
MAX_EVENTS = 1 << 16


class Refusal(Enum):
    """Why there is no room for a key."""

    PRESENT = "committed already"
    BUSY = "another session writes it"
    FULL = "everything is held"


@dataclass
class Counts:
    """Since the start of the store."""

    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    num_writes: int = 0
    num_checksum_mismatches: int = 0
    num_fenced_sessions: int = 0


class BlockStore:
    """See the module's first lines.

    Args:
        places: all the room there is.
        epoch: of this start of the store.
        session_ttl_s: a session that is silent for longer is fenced.
        quarantine_s: a fenced session whose process lives for longer counts as a leak.
        max_events: changes that are kept for those who watch.

    Attributes:
        events: what became readable here, and what went.
    """

    def __init__(
        self, places: PlaceTable, epoch: Epoch, *, session_ttl_s: float, quarantine_s: float, max_events: int = MAX_EVENTS
    ):
        self.epoch = epoch
        self.events = EventLog(max_events)
        self.counts = Counts()
        self.sessions: dict[SessionId, Session] = {}
        self._places = places
        self._session_ttl_s = session_ttl_s
        self._quarantine_s = quarantine_s
        self._reserved: dict[BlockKey, Block] = {}
        self._committed: dict[BlockKey, Block] = {}
        # Committed blocks that nobody reads, least recently used first.
        self._unread: OrderedDict[BlockKey, Block] = OrderedDict()
        self._next_lease_id = 1

    # Sessions

    def open_session(self, session_id: SessionId, client_id: str, layout: Layout, now: float) -> Session:
        """A new session."""
        session = Session(session_id, client_id, layout, last_seen_s=now)
        self.sessions[session_id] = session
        return session

    def session(self, session_id: SessionId, epoch: Epoch, now: float) -> Session:
        """The session of a call, which counts as a sign of life.

        Raises:
            StaleEpoch: the store has restarted, or the session is closed or fenced.
        """
        if epoch != self.epoch:
            raise StaleEpoch("the store has restarted; open a new session")
        session = self.sessions.get(session_id)
        if session is None or session.is_fenced:
            raise StaleEpoch("the session is closed or was silent for too long; open a new one")
        session.last_seen_s = now
        return session

    def close_session(self, session: Session) -> None:
        """Takes back everything that the session holds. Its process must not touch the bytes any more."""
        if self.sessions.pop(session.session_id, None) is None:
            return
        for lease in session.leases.values():
            self._end_lease(lease)
        session.leases.clear()

    def socket_opened(self, session_id: SessionId) -> None:
        """The session's process maps the slabs; from now on its socket says whether it lives."""
        self.sessions[session_id].has_socket = True

    def socket_closed(self, session_id: SessionId) -> None:
        """The session's process touches the bytes no more: it is gone, or says so."""
        session = self.sessions.get(session_id)
        if session is not None:
            self.close_session(session)

    def expire(self, now: float) -> list[Session]:
        """Fences silent sessions, and closes those of them that cannot touch the bytes.

        Returns:
            Sessions that were fenced or that became leaks by this call.
        """
        changed = []
        for session in list(self.sessions.values()):
            if session.fenced_at_s is not None:
                if not session.is_leaked and now - session.fenced_at_s > self._quarantine_s:
                    session.is_leaked = True
                    changed.append(session)
            elif now - session.last_seen_s > self._session_ttl_s:
                self._fence(session, now)
                changed.append(session)
        return changed

    def _fence(self, session: Session, now: float) -> None:
        self.counts.num_fenced_sessions += 1
        session.fenced_at_s = now
        if not session.has_socket:
            self.close_session(session)
            return
        for lease in session.leases.values():
            if lease.kind is LeaseKind.WRITE:
                # Another client may write the key, elsewhere.
                del self._reserved[lease.block.key]
                lease.block.state = BlockState.QUARANTINED

    # Writing

    def reserve(self, session: Session, key: BlockKey, layout: Layout | None = None) -> Lease | Refusal:
        """Room for a block, evicting what nobody reads, least recently used first.

        Args:
            session: who will write it.
            key: of the block.
            layout: of the block; None: that of the session.

        Returns:
            A write lease, or why there is none.

        Raises:
            StaleEpoch: the session is closed or fenced.
        """
        self._check_open(session)
        if key in self._committed:
            if key in self._unread:
                self._unread.move_to_end(key)
            return Refusal.PRESENT
        if key in self._reserved:
            return Refusal.BUSY
        layout = layout or session.layout
        place = self._places.allocate(layout.block_bytes)
        while place is None:
            if not self._unread:
                return Refusal.FULL
            self._remove(next(iter(self._unread.values())))
            self.counts.num_evictions += 1
            place = self._places.allocate(layout.block_bytes)
        block = Block(key, layout, place)
        self._reserved[key] = block
        return self._lease(session, LeaseKind.WRITE, block)

    def reservation(self, session: Session, lease_id: LeaseId) -> Block | None:
        """The block behind a write lease; None: the session has no such lease."""
        lease = session.leases.get(lease_id)
        return lease.block if lease is not None and lease.kind is LeaseKind.WRITE else None

    def commit(
        self, session: Session, lease_id: LeaseId, *, generation: int, claimed: bytes, measured: bytes | None = None
    ) -> bool:
        """Makes a reserved block readable and ends its write lease.

        Args:
            session: who wrote it.
            lease_id: from reserve.
            generation: of the place that the client wrote to.
            claimed: the writer's checksum of what it wrote, which every reader compares with what it reads.
            measured: the store's own checksum of what is there, where the bytes came from far; None: it has not looked.

        Returns:
            False: there is no such lease, or the bytes are not what the client meant to write; the room is free again.
        """
        block = self.reservation(session, lease_id)
        if block is None or block.state is not BlockState.RESERVED:
            return False
        del self._reserved[block.key]
        self._forget(session.leases[lease_id])
        is_wrong = measured is not None and claimed != measured
        if block.place.generation != generation or is_wrong:
            self.counts.num_checksum_mismatches += is_wrong
            self._places.free(block.place)
            return False
        block.state = BlockState.COMMITTED
        block.checksum = claimed
        self._committed[block.key] = block
        self._unread[block.key] = block
        self.counts.num_writes += 1
        self.events.append(EventKind.STORED, block.key, TIER)
        return True

    def abort(self, session: Session, lease_ids: Iterable[LeaseId]) -> None:
        """Gives reserved room back; ids of other leases are passed over."""
        for lease_id in lease_ids:
            if self.reservation(session, lease_id) is not None:
                self._end_lease(session.leases[lease_id])

    # Reading

    def contains(self, key: BlockKey) -> bool:
        """Whether the key is readable."""
        return key in self._committed

    def committed_block(self, key: BlockKey) -> Block | None:
        """The readable block of a key, without a lease: good until the caller lets others run."""
        return self._committed.get(key)

    def acquire(self, session: Session, key: BlockKey) -> Lease | None:
        """A read lease; None: the key is not here, or of another size than the session's blocks."""
        block = self._committed.get(key)
        if block is None or block.layout.block_bytes != session.layout.block_bytes:
            self.counts.num_misses += 1
            return None
        self.counts.num_hits += 1
        return self.hold(session, block)

    def hold(self, session: Session, block: Block) -> Lease:
        """A read lease on a committed block that the caller has found by itself.

        Raises:
            StaleEpoch: the session is closed or fenced.
        """
        self._check_open(session)
        block.num_readers += 1
        self._unread.pop(block.key, None)
        return self._lease(session, LeaseKind.READ, block)

    def release(self, session: Session, lease_ids: Iterable[LeaseId]) -> None:
        """Ends read leases; ids of other leases are passed over."""
        for lease_id in lease_ids:
            lease = session.leases.get(lease_id)
            if lease is not None and lease.kind is LeaseKind.READ:
                self._end_lease(lease)

    # Removing

    def drop_corrupt(self, block: Block) -> None:
        """The block's bytes are not what was committed: nobody gets it any more. Its place is free after its last reader."""
        if block.state is BlockState.COMMITTED:
            self.counts.num_checksum_mismatches += 1
            self._remove(block)

    def evict(self, key: BlockKey) -> bool:
        """Drops one block; False: it is not here or somebody reads it."""
        block = self._unread.get(key)
        if block is None:
            return False
        self._remove(block)
        self.counts.num_evictions += 1
        return True

    def clear(self, fingerprint: bytes | None) -> tuple[int, int]:
        """Drops every block, of one layout or of all, that nobody holds.

        Returns:
            (num_dropped, num_kept)
        """
        chosen = [b for b in self._committed.values() if fingerprint is None or b.layout.fingerprint == fingerprint]
        unread = [block for block in chosen if block.num_readers == 0]
        for block in unread:
            self._remove(block)
        return len(unread), len(chosen) - len(unread)

    def _remove(self, block: Block) -> None:
        del self._committed[block.key]
        self._unread.pop(block.key, None)
        block.state = BlockState.DROPPED
        if block.num_readers == 0:
            self._places.free(block.place)
        self.events.append(EventKind.REMOVED, block.key, TIER)

    # Leases

    def _check_open(self, session: Session) -> None:
        """A call that waited may find its session closed meanwhile: what it would take now would never come back."""
        if session.is_fenced or self.sessions.get(session.session_id) is not session:
            raise StaleEpoch("the session was closed meanwhile; open a new one")

    def _lease(self, session: Session, kind: LeaseKind, block: Block) -> Lease:
        lease = Lease(LeaseId(self._next_lease_id), session.session_id, kind, block)
        self._next_lease_id += 1
        session.leases[lease.lease_id] = lease
        return lease

    def _forget(self, lease: Lease) -> None:
        session = self.sessions.get(lease.session_id)
        if session is not None:
            del session.leases[lease.lease_id]

    def _end_lease(self, lease: Lease) -> None:
        self._forget(lease)
        block = lease.block
        if lease.kind is LeaseKind.WRITE:
            if block.state is BlockState.RESERVED:
                del self._reserved[block.key]
            self._places.free(block.place)
            return
        block.num_readers -= 1
        if block.num_readers == 0:
            if block.state is BlockState.DROPPED:
                self._places.free(block.place)
            else:
                self._unread[block.key] = block

    # Looking

    def blocks(self) -> list[Block]:
        """Readable blocks, without leases: good until the caller lets others run."""
        return list(self._committed.values())

    def committed_keys(self) -> list[BlockKey]:
        """Keys of all readable blocks."""
        return list(self._committed)

    @property
    def num_blocks(self) -> int:
        """Readable blocks."""
        return len(self._committed)

    @property
    def num_leased_blocks(self) -> int:
        """Blocks that cannot be evicted because somebody reads or writes them."""
        return len({id(lease.block) for session in self.sessions.values() for lease in session.leases.values()})

    @property
    def num_quarantined_blocks(self) -> int:
        """Reserved room of fenced sessions whose process is still there."""
        held = (lease.block for session in self.sessions.values() for lease in session.leases.values())
        return sum(block.state is BlockState.QUARANTINED for block in held)

    def check_integrity(self) -> None:
        """Raises AssertionError unless index, leases and places agree."""
        blocks = {id(block): block for block in [*self._reserved.values(), *self._committed.values()]}
        num_readers: dict[int, int] = {}
        for session in self.sessions.values():
            for lease_id, lease in session.leases.items():
                assert (lease.lease_id, lease.session_id) == (lease_id, session.session_id), f"{lease} is in the wrong place"
                blocks[id(lease.block)] = lease.block
                if lease.kind is LeaseKind.READ:
                    num_readers[id(lease.block)] = num_readers.get(id(lease.block), 0) + 1
                    assert lease.block.state in (BlockState.COMMITTED, BlockState.DROPPED), f"{lease.block} is read"
                else:
                    expected = BlockState.QUARANTINED if session.is_fenced else BlockState.RESERVED
                    assert lease.block.state is expected, f"{lease.block} of {session.session_id} should be {expected}"
        for block in blocks.values():
            assert block.num_readers == num_readers.get(id(block), 0), f"{block} has {num_readers.get(id(block), 0)} read leases"
        for key, block in self._committed.items():
            assert (block.key, block.state) == (key, BlockState.COMMITTED), f"{block} is indexed as committed"
            assert (key in self._unread) == (block.num_readers == 0), f"{block} in the eviction order: {key in self._unread}"
        for key, block in self._reserved.items():
            assert (block.key, block.state) == (key, BlockState.RESERVED), f"{block} is indexed as reserved"
            assert key not in self._committed, f"{block} is both reserved and committed"
        assert all(key in self._committed for key in self._unread), "the eviction order has blocks that are gone"
        self._places.check_integrity([block.place for block in blocks.values()])
