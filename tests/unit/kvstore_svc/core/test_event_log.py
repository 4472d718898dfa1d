"""Events keep their order, and who missed some is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_svc.core.event_log import BlockEvent, EventKind, EventLog
from tests.unit.kvstore_svc.core.stores import acquire, key, make_store, open_session, write


def make_log(capacity: int, num_events: int) -> EventLog:
    log = EventLog(capacity)
    for number in range(1, num_events + 1):
        log.append(EventKind.STORED, key(number), "shm")
    return log


def stored(number: int) -> BlockEvent:
    return BlockEvent(EventKind.STORED, key(number), "shm")


@given(st.integers(1, 9), st.integers(0, 30), st.integers(-1, 32), st.integers(1, 12))
def test_a_reader_gets_what_it_does_not_know_or_is_told_that_it_is_gone(
    capacity: int, num_events: int, sequence: int, limit: int
) -> None:
    events = make_log(capacity, num_events).after(sequence, limit)

    if num_events - capacity <= sequence <= num_events and sequence >= 0:
        assert events == [stored(n) for n in range(sequence + 1, min(sequence + limit, num_events) + 1)]
    else:
        assert events is None


def test_listeners_hear_of_each_event() -> None:
    log, heard = EventLog(2), []
    log.on_append = lambda: heard.append(log.last_sequence)

    for number in range(5):
        log.append(EventKind.REMOVED, key(number), "shm")

    assert heard == [1, 2, 3, 4, 5]


def test_the_store_says_what_becomes_readable_and_what_goes() -> None:
    store = make_store(2)
    session = open_session(store)
    write(store, session, 1, 2)
    lease = acquire(store, session, 1)
    write(store, session, 3)  # 2 makes room
    store.drop_corrupt(lease.block)
    assert store.evict(key(3))

    events = store.events.after(0, 100)

    assert events is not None
    assert [(event.kind.name, event.key) for event in events] == [
        ("STORED", key(1)),
        ("STORED", key(2)),
        ("REMOVED", key(2)),
        ("STORED", key(3)),
        ("REMOVED", key(1)),
        ("REMOVED", key(3)),
    ]


@pytest.mark.parametrize("capacity", [1, 3, 100])
def test_replayed_events_are_what_the_store_has(capacity: int) -> None:
    store = make_store(8)
    session = open_session(store)
    known: set[bytes] = set()
    sequence = 0
    for number in range(40):
        write(store, session, number)
        if number % 7 == 0:
            store.clear(None)
        if number % 3 == 0:
            events = store.events.after(sequence, 1000)
            if events is None:  # as a reader who begins again
                known, events = set(store.committed_keys()), []
            for event in events:
                (known.add if event.kind is EventKind.STORED else known.discard)(event.key)
            sequence = store.events.last_sequence
            assert known == set(store.committed_keys())
