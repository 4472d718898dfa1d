"""Any order of calls, deaths and silences: no early read, no block taken from under a client, nothing lost."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore_svc.core.block import Layout
from kvstore_svc.core.block_store import Refusal
from kvstore_svc.core.place import Place
from kvstore_svc.core.session import Lease, LeaseKind, Session
from tests.unit.kvstore_svc.core.stores import PAGE_BYTES, QUARANTINE_S, TTL_S, commit, key, make_store

NUM_PAGES = (5, 8)
KEYS = st.integers(0, 11)
PICKS = st.integers(0, 10**6)


class BlockStoreMachine(RuleBasedStateMachine):
    """Clients write into a model of the memory; a place that two of them write to, or that changes under a reader, shows."""

    def __init__(self) -> None:
        super().__init__()
        self.store = make_store(*NUM_PAGES)
        self.now = 0.0
        self.num_sessions = 0
        # What lies in each page: the lease that wrote it last.
        self.memory: dict[tuple[int, int], int] = {}
        self.written: dict[int, int] = {}  # id of a committed block: the lease that wrote it
        self.ever_committed: set[int] = set()

    def live_sessions(self) -> list[Session]:
        return [session for session in self.store.sessions.values() if not session.is_fenced]

    def leases(self, kind: LeaseKind, *, fenced: bool = False) -> list[tuple[Session, Lease]]:
        sessions = self.store.sessions.values()
        pairs = [(session, lease) for session in sessions for lease in session.leases.values()]
        return [(session, lease) for session, lease in pairs if lease.kind is kind and session.is_fenced == fenced]

    def pages(self, place: Place) -> list[tuple[int, int]]:
        return [(place.slab_id, page) for page in range(place.start_page, place.start_page + place.num_pages)]

    @rule(num_pages=st.integers(1, 3), has_socket=st.booleans())
    def open(self, num_pages: int, has_socket: bool) -> None:
        if len(self.store.sessions) >= 4:
            return
        self.num_sessions += 1
        layout = Layout(bytes([num_pages]) * 32, num_pages * PAGE_BYTES)
        session = self.store.open_session(f"s{self.num_sessions}", "client", layout, self.now)  # type: ignore[arg-type]
        if has_socket:
            self.store.socket_opened(session.session_id)

    @precondition(lambda self: self.live_sessions())
    @rule(pick=PICKS, number=KEYS)
    def reserve(self, pick: int, number: int) -> None:
        session = self.live_sessions()[pick % len(self.live_sessions())]
        held = {page for kind in LeaseKind for fenced in (False, True) for _, lease in self.leases(kind, fenced=fenced)
                for page in self.pages(lease.block.place)}  # fmt: skip
        was_there = self.store.contains(key(number))
        lease = self.store.reserve(session, key(number))
        if isinstance(lease, Refusal):
            assert (lease is Refusal.PRESENT) == was_there
            return
        assert not was_there
        assert held.isdisjoint(self.pages(lease.block.place)), "a held place was given out"
        for page in self.pages(lease.block.place):
            self.memory[page] = lease.lease_id

    @precondition(lambda self: self.leases(LeaseKind.WRITE))
    @rule(pick=PICKS, is_right=st.booleans())
    def commit(self, pick: int, is_right: bool) -> None:
        leases = self.leases(LeaseKind.WRITE)
        session, lease = leases[pick % len(leases)]
        assert not self.store.contains(lease.block.key), "readable before its commit"
        if is_right:
            assert commit(self.store, session, lease)
            self.written[id(lease.block)] = lease.lease_id
        else:
            generation = lease.block.place.generation
            assert not self.store.commit(session, lease.lease_id, generation=generation, claimed=b"a", measured=b"b")
        assert self.store.contains(lease.block.key) == is_right

    @precondition(lambda self: self.leases(LeaseKind.WRITE))
    @rule(pick=PICKS)
    def abort(self, pick: int) -> None:
        leases = self.leases(LeaseKind.WRITE)
        session, lease = leases[pick % len(leases)]
        self.store.abort(session, [lease.lease_id])
        assert not self.store.contains(lease.block.key)

    @precondition(lambda self: self.live_sessions())
    @rule(pick=PICKS, number=KEYS)
    def acquire(self, pick: int, number: int) -> None:
        session = self.live_sessions()[pick % len(self.live_sessions())]
        lease = self.store.acquire(session, key(number))
        if lease is not None:
            assert id(lease.block) in self.written, "read before its commit"

    @precondition(lambda self: self.leases(LeaseKind.READ))
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        leases = self.leases(LeaseKind.READ)
        session, lease = leases[pick % len(leases)]
        self.store.release(session, [lease.lease_id])

    @precondition(lambda self: self.leases(LeaseKind.READ))
    @rule(pick=PICKS)
    def find_corrupt(self, pick: int) -> None:
        leases = self.leases(LeaseKind.READ)
        _, lease = leases[pick % len(leases)]
        self.store.drop_corrupt(lease.block)
        assert not self.store.contains(lease.block.key) or self.store.committed_block(lease.block.key) is not lease.block

    @rule(number=KEYS)
    def evict(self, number: int) -> None:
        self.store.evict(key(number))

    @rule()
    def clear(self) -> None:
        self.store.clear(None)

    @precondition(lambda self: self.store.sessions)
    @rule(pick=PICKS)
    def close_or_die(self, pick: int) -> None:
        sessions = list(self.store.sessions.values())
        session = sessions[pick % len(sessions)]
        if session.has_socket:
            self.store.socket_closed(session.session_id)
        else:
            self.store.close_session(session)

    @rule(silent_s=st.sampled_from([1.0, TTL_S + 1, QUARANTINE_S + 1]), pick=PICKS)
    def pass_time(self, silent_s: float, pick: int) -> None:
        self.now += silent_s
        for index, session in enumerate(self.live_sessions()):
            if (pick >> index) & 1:
                self.store.session(session.session_id, self.store.epoch, self.now)
        self.store.expire(self.now)

    @invariant()
    def is_sound(self) -> None:
        self.store.check_integrity()

    @invariant()
    def readers_see_what_was_committed(self) -> None:
        for fenced in (False, True):
            for _, lease in self.leases(LeaseKind.READ, fenced=fenced):
                writer = self.written[id(lease.block)]
                assert {self.memory[page] for page in self.pages(lease.block.place)} == {writer}, "overwritten under a reader"

    def teardown(self) -> None:
        for session in list(self.store.sessions.values()):
            self.store.socket_closed(session.session_id)
        self.store.clear(None)
        self.store.check_integrity()
        assert (self.store.num_blocks, self.store.num_leased_blocks) == (0, 0)
        session = self.store.open_session("last", "last", Layout(b"z" * 32, max(NUM_PAGES) * PAGE_BYTES), self.now)  # type: ignore[arg-type]
        assert isinstance(self.store.reserve(session, key(0)), Lease), "not all pages came back"


TestBlockStoreMachine = BlockStoreMachine.TestCase
TestBlockStoreMachine.settings = settings(max_examples=60, stateful_step_count=60)
