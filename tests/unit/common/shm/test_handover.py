"""The messages of the descriptor socket."""

import pytest

from common.shm.handover import REPLY, REQUEST, HandoverReply, HandoverRequest, HandoverStatus

SESSION_ID = "0b7d3f0e-8f0c-4a54-9d0e-0e2a55f0c1aa"


def test_messages_have_the_sizes_of_the_layout_page() -> None:
    assert (REQUEST.size, REPLY.size) == (76, 24)


def test_messages_survive_the_wire() -> None:
    request = HandoverRequest(SESSION_ID, b"t" * 32)
    reply = HandoverReply(num_fds=2, epoch=2**64 - 1, first_slab=64, status=HandoverStatus.BAD_TICKET)

    assert HandoverRequest.unpack(request.pack()) == request
    assert HandoverReply.unpack(reply.pack()) == reply


@pytest.mark.parametrize(
    "data",
    [b"", b"x" * 75, b"x" * 76, HandoverRequest(SESSION_ID, b"t" * 32).pack() + b"x", bytes(76)],
    ids=["nothing", "short", "other", "long", "zeros"],
)
def test_bytes_that_are_no_request_are_recognised(data: bytes) -> None:
    assert HandoverRequest.unpack(data) is None


@pytest.mark.parametrize(
    "data", [b"", bytes(24), HandoverReply(0, 0, 0, HandoverStatus.OK).pack()[:-1], REPLY.pack(0x4F435456, 1, 0, 0, 0, 77)]
)
def test_bytes_that_are_no_reply_are_recognised(data: bytes) -> None:
    assert HandoverReply.unpack(data) is None


def test_a_session_id_that_is_not_text_is_no_request() -> None:
    data = bytearray(HandoverRequest(SESSION_ID, b"t" * 32).pack())
    data[10] = 0xFF

    assert HandoverRequest.unpack(bytes(data)) is None
