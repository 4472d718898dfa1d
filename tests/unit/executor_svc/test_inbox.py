"""The worker's two ways in: a line is for one session, and no line ever holds the worker up."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from common.frames import Frame, FrameKind, FramePipe
from executor_svc.inbox import LINE_MESSAGE, Inbox


@dataclass
class Front:
    """The other ends of an inbox."""

    pipe: FramePipe
    lines: socket.socket

    def give_line(self, session: int) -> FramePipe:
        ours, theirs = socket.socketpair()
        socket.send_fds(self.lines, [LINE_MESSAGE.pack(session)], [theirs.fileno()])
        theirs.close()
        return FramePipe(ours)


@pytest.fixture
def ends() -> Iterator[tuple[Inbox, Front]]:
    pipe, their_pipe = socket.socketpair()
    lines, their_lines = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with pipe, their_pipe, lines, their_lines:
        inbox = Inbox(FramePipe(their_pipe), their_lines)
        yield inbox, Front(FramePipe(pipe), lines)
        inbox.end()


def command(session: int, payload: bytes = b"plan") -> Frame:
    return Frame(FrameKind.COMMAND, session, payload)


def test_without_a_line_everything_goes_by_the_pipe(ends: tuple[Inbox, Front]) -> None:
    inbox, front = ends
    inbox.begin(1)
    front.pipe.send(command(1))
    assert inbox.receive(wait=True) == [command(1)]
    inbox.send(Frame(FrameKind.EVENT, 1, b"result"))
    assert front.pipe.receive(wait=True) == [Frame(FrameKind.EVENT, 1, b"result")]


def test_events_take_the_sessions_line(ends: tuple[Inbox, Front]) -> None:
    inbox, front = ends
    inbox.begin(7)
    line = front.give_line(7)
    assert inbox.receive(wait=False) == []
    assert line.receive(wait=True) == [Frame(FrameKind.OPENED, 7)]
    line.send(command(7))
    assert inbox.receive(wait=True) == [command(7)]
    inbox.send(Frame(FrameKind.EVENT, 7, b"result"))
    inbox.send_front(Frame(FrameKind.READY, payload=b"info"))
    assert line.receive(wait=True) == [Frame(FrameKind.EVENT, 7, b"result")]
    assert front.pipe.receive(wait=True) == [Frame(FrameKind.READY, payload=b"info")]
    line.close()


def test_a_line_of_another_session_is_closed(ends: tuple[Inbox, Front]) -> None:
    inbox, front = ends
    inbox.begin(2)
    line = front.give_line(1)
    assert inbox.receive(wait=False) == []
    assert line.receive(wait=True) is None
    line.close()


def test_a_line_ends_with_its_session(ends: tuple[Inbox, Front]) -> None:
    inbox, front = ends
    inbox.begin(1)
    line = front.give_line(1)
    inbox.receive(wait=False)
    inbox.begin(2)
    assert line.receive(wait=True) == [Frame(FrameKind.OPENED, 1)]
    assert line.receive(wait=True) is None
    front.pipe.send(command(2))
    assert inbox.receive(wait=True) == [command(2)]
    line.close()


def test_a_line_carries_commands_and_nothing_else(ends: tuple[Inbox, Front]) -> None:
    inbox, front = ends
    inbox.begin(1)
    line = front.give_line(1)
    inbox.receive(wait=False)
    for frame in (Frame(FrameKind.OPEN, 5), Frame(FrameKind.SETTINGS), command(1)):
        line.send(frame)
    assert inbox.receive(wait=True) == [command(1)]
    line.close()


def test_a_scheduler_that_is_gone_is_the_fronts_business(ends: tuple[Inbox, Front]) -> None:
    inbox, front = ends
    inbox.begin(1)
    front.give_line(1).close()
    while inbox.receive(wait=False):
        pass
    for _ in range(3):
        inbox.send(Frame(FrameKind.EVENT, 1, b"result"))
    front.pipe.send(Frame(FrameKind.CLOSE, 1))
    assert inbox.receive(wait=True) == [Frame(FrameKind.CLOSE, 1)]


def test_a_scheduler_that_reads_nothing_loses_its_line_and_holds_nobody_up(ends: tuple[Inbox, Front]) -> None:
    inbox, front = ends
    inbox.begin(1)
    line = front.give_line(1)
    inbox.receive(wait=False)
    inbox.send(Frame(FrameKind.EVENT, 1, bytes(8 << 20)))  # more than a socket takes: a second later it is given up
    front.pipe.send(Frame(FrameKind.OPEN, 2))
    assert Frame(FrameKind.OPEN, 2) in (inbox.receive(wait=True) or [])
    line.close()


def test_the_end_of_the_front_is_the_end(ends: tuple[Inbox, Front]) -> None:
    inbox, front = ends
    inbox.begin(1)
    line = front.give_line(1)
    inbox.receive(wait=False)
    front.pipe.shut_down()
    assert inbox.receive(wait=True) is None
    line.close()
