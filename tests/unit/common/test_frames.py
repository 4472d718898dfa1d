"""Frames between front and worker: whole, in order, whatever the pieces they arrive in."""

import socket

from hypothesis import given, settings
from hypothesis import strategies as st

from common.frames import Frame, FrameKind, FramePipe

FRAMES = st.lists(
    st.builds(Frame, st.sampled_from(FrameKind), st.integers(0, 2**32 - 1), st.binary(max_size=300)), min_size=1, max_size=6
)


@settings(max_examples=50)
@given(frames=FRAMES, cuts=st.lists(st.integers(1, 400), min_size=1, max_size=8))
def test_frames_come_out_whole_and_in_order(frames: list[Frame], cuts: list[int]) -> None:
    ours, theirs = socket.socketpair()
    pipe = FramePipe(theirs)
    data = b"".join(frame.encode() for frame in frames)
    received: list[Frame] = []
    with ours, theirs:
        while data:
            size = cuts[len(received) % len(cuts)]
            ours.sendall(data[:size])
            data = data[size:]
            received += pipe.receive(wait=False) or []

    assert received == frames


def test_nothing_is_waited_for_while_there_is_other_work() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert FramePipe(theirs).receive(wait=False) == []


def test_what_was_sent_before_the_end_is_received_before_the_end() -> None:
    ours, theirs = socket.socketpair()
    frame = Frame(FrameKind.COMMAND, 3, b"last")
    with ours, theirs:
        pipe = FramePipe(theirs)
        ours.sendall(frame.encode())
        ours.close()

        assert pipe.receive(wait=True) == [frame]
        assert pipe.receive(wait=True) is None


def test_sent_frames_are_what_the_other_end_receives() -> None:
    ours, theirs = socket.socketpair()
    frames = [Frame(FrameKind.EVENT, 1, b"x" * 5000), Frame(FrameKind.PROGRESS)]
    with ours, theirs:
        sender, receiver = FramePipe(ours), FramePipe(theirs)
        for frame in frames:
            sender.send(frame)

        assert receiver.receive(wait=True) == frames
