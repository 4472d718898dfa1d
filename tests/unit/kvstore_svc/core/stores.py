"""Small stores for tests."""

import numpy as np

from common.ids import BlockKey, Epoch, SessionId
from kvstore_svc.core.block import Layout
from kvstore_svc.core.block_store import BlockStore
from kvstore_svc.core.place import PlaceTable
from kvstore_svc.core.session import Lease, Session

PAGE_BYTES = 4096
EPOCH = Epoch(7)
TTL_S = 10.0
QUARANTINE_S = 300.0
LAYOUT = Layout(b"a" * 32, PAGE_BYTES)


def make_store(*num_pages: int) -> BlockStore:
    places = PlaceTable([np.zeros(n, np.uint64) for n in num_pages or (4,)], PAGE_BYTES)
    return BlockStore(places, EPOCH, session_ttl_s=TTL_S, quarantine_s=QUARANTINE_S)


def open_session(store: BlockStore, name: str = "client", *, layout: Layout = LAYOUT, socket: bool = False) -> Session:
    session = store.open_session(SessionId(name), name, layout, now=0.0)
    if socket:
        store.socket_opened(session.session_id)
    return session


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def reserve(store: BlockStore, session: Session, number: int) -> Lease:
    lease = store.reserve(session, key(number))
    assert isinstance(lease, Lease), lease
    return lease


def commit(store: BlockStore, session: Session, lease: Lease) -> bool:
    return store.commit(session, lease.lease_id, generation=lease.block.place.generation, claimed=b"c" * 16, measured=b"c" * 16)


def write(store: BlockStore, session: Session, *numbers: int) -> None:
    for number in numbers:
        assert commit(store, session, reserve(store, session, number))


def acquire(store: BlockStore, session: Session, number: int) -> Lease:
    lease = store.acquire(session, key(number))
    assert lease is not None
    return lease
