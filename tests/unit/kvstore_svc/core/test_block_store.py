"""The index: when a block can be read, who may write where, what goes first, and what comes back when clients die."""

import pytest

from common.errors import StaleEpoch
from common.ids import Epoch, LeaseId, SessionId
from kvstore_svc.core.block import Layout
from kvstore_svc.core.block_store import Refusal
from tests.unit.kvstore_svc.core.stores import (
    EPOCH,
    LAYOUT,
    PAGE_BYTES,
    QUARANTINE_S,
    TTL_S,
    acquire,
    commit,
    key,
    make_store,
    open_session,
    reserve,
    write,
)


def test_a_block_is_readable_only_after_its_commit() -> None:
    store = make_store()
    session = open_session(store)
    lease = reserve(store, session, 1)

    assert not store.contains(key(1))
    assert store.acquire(session, key(1)) is None
    assert commit(store, session, lease)
    assert store.contains(key(1))
    assert store.acquire(session, key(1)) is not None
    store.check_integrity()


def test_a_key_is_written_by_one_session_at_a_time() -> None:
    store = make_store()
    first, second = open_session(store, "first"), open_session(store, "second")
    lease = reserve(store, first, 1)

    assert store.reserve(second, key(1)) is Refusal.BUSY
    commit(store, first, lease)
    assert store.reserve(second, key(1)) is Refusal.PRESENT


def test_wrong_bytes_are_rejected_counted_and_their_room_is_free() -> None:
    store = make_store(1)
    session = open_session(store)
    lease = reserve(store, session, 1)

    assert not store.commit(
        session, lease.lease_id, generation=lease.block.place.generation, claimed=b"a" * 16, measured=b"b" * 16
    )
    assert store.counts.num_checksum_mismatches == 1
    assert not store.contains(key(1))
    write(store, session, 2)
    store.check_integrity()


def test_a_commit_that_nobody_has_measured_keeps_the_writers_checksum() -> None:
    store = make_store(1)
    session = open_session(store)
    lease = reserve(store, session, 1)

    assert store.commit(session, lease.lease_id, generation=lease.block.place.generation, claimed=b"a" * 16)
    assert acquire(store, session, 1).block.checksum == b"a" * 16


def test_a_commit_for_another_generation_is_rejected() -> None:
    store = make_store(1)
    session = open_session(store)
    lease = reserve(store, session, 1)

    assert not store.commit(session, lease.lease_id, generation=99, claimed=b"c" * 16, measured=b"c" * 16)
    assert not store.contains(key(1))


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_lease_ends_once(end: str) -> None:
    store = make_store()
    session = open_session(store)
    lease = reserve(store, session, 1)
    if end == "commit":
        assert commit(store, session, lease)
    else:
        store.abort(session, [lease.lease_id])

    assert not commit(store, session, lease)
    store.abort(session, [lease.lease_id])
    store.release(session, [lease.lease_id, LeaseId(12345)])
    store.check_integrity()


def test_a_session_cannot_end_the_leases_of_another() -> None:
    store = make_store(1)
    owner, stranger = open_session(store, "owner"), open_session(store, "stranger")
    lease = reserve(store, owner, 1)

    assert not commit(store, stranger, lease)
    store.abort(stranger, [lease.lease_id])
    assert commit(store, owner, lease)
    read = acquire(store, owner, 1)
    store.release(stranger, [read.lease_id])
    assert store.reserve(stranger, key(2)) is Refusal.FULL


def test_the_least_recently_used_block_goes_first() -> None:
    store = make_store(3)
    session = open_session(store)
    write(store, session, 1, 2, 3)
    store.release(session, [acquire(store, session, 1).lease_id])
    assert store.reserve(session, key(2)) is Refusal.PRESENT  # a use too

    write(store, session, 4)

    assert [n for n in (1, 2, 3, 4) if store.contains(key(n))] == [1, 2, 4]
    write(store, session, 5)
    assert [n for n in (1, 2, 4, 5) if store.contains(key(n))] == [2, 4, 5]
    assert store.counts.num_evictions == 2


def test_a_block_that_somebody_reads_is_not_evicted() -> None:
    store = make_store(2)
    session = open_session(store)
    write(store, session, 1, 2)
    leases = [acquire(store, session, 1), acquire(store, session, 1)]

    write(store, session, 3)
    assert store.contains(key(1))
    assert not store.contains(key(2))
    store.release(session, [leases[0].lease_id])
    acquire(store, session, 3)
    assert store.reserve(session, key(4)) is Refusal.FULL
    store.release(session, [leases[1].lease_id])
    write(store, session, 4)
    assert not store.contains(key(1))
    store.check_integrity()


def test_a_large_block_evicts_as_many_as_it_needs_and_no_more() -> None:
    store = make_store(4)
    small = open_session(store, "small")
    large = open_session(store, "large", layout=Layout(b"b" * 32, 2 * PAGE_BYTES))
    write(store, small, 1, 2, 3, 4)

    write(store, large, 5)

    assert [n for n in (1, 2, 3, 4, 5) if store.contains(key(n))] == [3, 4, 5]
    store.check_integrity()


def test_a_key_of_another_block_size_is_a_miss() -> None:
    store = make_store()
    write(store, open_session(store, "small"), 1)
    large = open_session(store, "large", layout=Layout(b"b" * 32, 2 * PAGE_BYTES))

    assert store.acquire(large, key(1)) is None


def test_an_old_epoch_and_an_unknown_session_are_stale() -> None:
    store = make_store()
    session = open_session(store)

    assert store.session(session.session_id, EPOCH, now=1.0) is session
    with pytest.raises(StaleEpoch, match="restarted"):
        store.session(session.session_id, Epoch(EPOCH + 1), now=1.0)
    with pytest.raises(StaleEpoch, match="closed"):
        store.session(SessionId("nobody"), EPOCH, now=1.0)


@pytest.mark.parametrize("socket", [False, True])
def test_a_closed_or_fenced_session_gets_no_more_leases(socket: bool) -> None:
    """A call that waits for a lower tier may outlive its session."""
    store = make_store()
    session = open_session(store, socket=socket)
    write(store, session, 1)
    store.expire(now=TTL_S + 1)

    with pytest.raises(StaleEpoch, match="meanwhile"):
        store.acquire(session, key(1))
    with pytest.raises(StaleEpoch, match="meanwhile"):
        store.reserve(session, key(2))
    store.check_integrity()


def test_closing_gives_back_reservations_and_read_leases() -> None:
    store = make_store(2)
    session, other = open_session(store), open_session(store, "other")
    write(store, session, 1)
    acquire(store, session, 1)
    reserve(store, session, 2)

    store.close_session(session)

    store.check_integrity()
    assert store.num_leased_blocks == 0
    write(store, other, 3, 4)


def test_a_silent_session_without_a_socket_loses_everything_at_once() -> None:
    store = make_store(1)
    session = open_session(store)
    reserve(store, session, 1)

    assert store.expire(now=TTL_S) == []
    assert store.expire(now=TTL_S + 0.1) == [session]
    assert session.session_id not in store.sessions
    assert store.counts.num_fenced_sessions == 1
    write(store, open_session(store, "other"), 1)


def test_a_silent_session_with_a_socket_is_fenced_and_its_reservations_are_quarantined() -> None:
    """Its process may wake up and write: nobody else gets the place, but anybody may write the key elsewhere."""
    store = make_store(2)
    sleeper = open_session(store, "sleeper", socket=True)
    lease = reserve(store, sleeper, 1)
    store.expire(now=TTL_S + 1)
    other = open_session(store, "other")

    with pytest.raises(StaleEpoch, match="silent"):
        store.session(sleeper.session_id, EPOCH, now=TTL_S + 2)
    assert store.num_quarantined_blocks == 1
    write(store, other, 1)
    assert acquire(store, other, 1).block.place != lease.block.place
    assert store.reserve(other, key(2)) is Refusal.FULL
    assert not commit(store, sleeper, lease)
    store.check_integrity()

    store.socket_closed(sleeper.session_id)
    assert store.num_quarantined_blocks == 0
    write(store, other, 2)
    store.check_integrity()


def test_a_fenced_session_keeps_its_read_leases_until_its_socket_ends() -> None:
    store = make_store(1)
    sleeper = open_session(store, "sleeper", socket=True)
    write(store, sleeper, 1)
    acquire(store, sleeper, 1)
    store.expire(now=TTL_S + 1)
    other = open_session(store, "other")

    assert store.reserve(other, key(2)) is Refusal.FULL
    store.socket_closed(sleeper.session_id)
    write(store, other, 2)


def test_a_long_quarantine_is_reported_once_and_stays() -> None:
    store = make_store(1)
    sleeper = open_session(store, "sleeper", socket=True)
    reserve(store, sleeper, 1)
    assert store.expire(now=TTL_S + 1) == [sleeper]

    assert store.expire(now=TTL_S + QUARANTINE_S) == []
    assert store.expire(now=TTL_S + QUARANTINE_S + 2) == [sleeper]
    assert sleeper.is_leaked
    assert store.expire(now=TTL_S + QUARANTINE_S + 3) == []
    assert store.num_quarantined_blocks == 1


def test_the_end_of_a_socket_is_the_end_of_the_session() -> None:
    store = make_store(1)
    session = open_session(store, socket=True)
    reserve(store, session, 1)

    store.socket_closed(session.session_id)
    store.socket_closed(session.session_id)

    write(store, open_session(store, "other"), 2)


def test_a_corrupt_block_is_gone_for_new_readers_and_freed_after_the_last_old_one() -> None:
    store = make_store(1)
    session = open_session(store)
    write(store, session, 1)
    first, second = acquire(store, session, 1), acquire(store, session, 1)

    store.drop_corrupt(first.block)
    store.drop_corrupt(first.block)

    assert store.counts.num_checksum_mismatches == 1
    assert store.acquire(session, key(1)) is None
    assert store.reserve(session, key(1)) is Refusal.FULL
    store.release(session, [first.lease_id, second.lease_id])
    write(store, session, 1)
    store.check_integrity()


def test_clear_drops_one_layout_and_keeps_what_is_held() -> None:
    store = make_store(4)
    session = open_session(store)
    other = open_session(store, "other", layout=Layout(b"b" * 32, PAGE_BYTES))
    write(store, session, 1, 2)
    write(store, other, 3)
    acquire(store, session, 2)

    assert store.clear(LAYOUT.fingerprint) == (1, 1)
    assert [n for n in (1, 2, 3) if store.contains(key(n))] == [2, 3]
    assert store.clear(None) == (1, 1)
    store.check_integrity()


def test_evict_drops_one_block_that_nobody_reads() -> None:
    store = make_store()
    session = open_session(store)
    write(store, session, 1, 2)
    acquire(store, session, 2)

    assert store.evict(key(1))
    assert not store.evict(key(1))
    assert not store.evict(key(2))
