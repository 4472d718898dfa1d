"""A call ends in time, and every block that comes moves the time."""

import threading
from collections.abc import Iterator

import grpc
import pytest

from common.patience import Patience
from executor_svc.clients.call_deadline import CallDeadline


class Cancelled(grpc.RpcError):
    """What iterating over a cancelled call raises."""


class StuckCall:
    """Gives some messages and then nothing, until it is cancelled."""

    def __init__(self, num_messages: int):
        self.num_messages = num_messages
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[int]:
        yield from range(self.num_messages)
        assert self.cancelled.wait(20)
        raise Cancelled

    def cancel(self) -> None:
        self.cancelled.set()


class EndingCall:
    """Gives some messages and ends."""

    def __init__(self, num_messages: int):
        self.num_messages = num_messages

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_messages))

    def cancel(self) -> None:
        pass


def test_a_call_that_gives_nothing_more_is_cancelled_and_what_came_counts() -> None:
    call = StuckCall(3)
    with CallDeadline(call, Patience(0.02, 0.01)) as deadline:
        found = []
        for message in deadline.responses():
            found.append(message)
            deadline.extend()

    assert found == [0, 1, 2]
    assert deadline.was_cancelled and deadline.is_over


def test_a_call_that_ends_in_time_is_not_cancelled() -> None:
    with CallDeadline(EndingCall(2), Patience(20.0)) as deadline:
        assert list(deadline.responses()) == [0, 1]

    assert not deadline.was_cancelled and not deadline.is_over


def test_an_error_of_the_call_is_passed_on() -> None:
    call = StuckCall(1)
    call.cancelled.set()
    with CallDeadline(call, Patience(20.0)) as deadline:
        responses = deadline.responses()
        assert next(responses) == 0
        try:
            next(responses)
        except Cancelled:
            return
    raise AssertionError("the error was swallowed")


def test_whoever_has_other_work_sees_whether_a_message_waits() -> None:
    call = StuckCall(1)
    with CallDeadline(call, Patience(20.0)) as deadline:
        responses = deadline.responses()
        assert next(responses) == 0
        assert not deadline.has_news
        call.cancelled.set()
        while not deadline.has_news:
            call.cancelled.wait(0.001)
        with pytest.raises(Cancelled):
            next(responses)
        assert deadline.has_news


def test_who_stops_listening_in_the_middle_waits_for_nobody() -> None:
    """More messages than are kept ready, and the call is cancelled by the end of the block."""
    call = StuckCall(50)
    with CallDeadline(call, Patience(20.0)) as deadline:
        assert next(deadline.responses()) == 0

    assert call.cancelled.is_set() and not deadline.was_cancelled
