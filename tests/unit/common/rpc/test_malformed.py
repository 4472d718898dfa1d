import pytest

from common.rpc.malformed import Malformed, find_invalid_text, tolerant
from octavo.scheduler.v1 import inference_service_pb2 as pb

METHOD = "/octavo.scheduler.v1.InferenceService/Generate"


def with_invalid_text(message: pb.GenerateRequest) -> bytes:
    """The message with the placeholder replaced by bytes of the same length that are not UTF-8."""
    return message.SerializeToString().replace(b"XX", b"\xff\xfe")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(text="hello XX"), "text"),
        (pb.GenerateRequest(stopping=pb.StoppingCriteria(stop=["good", "XX"])), "stopping.stop[1]"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="XX")])), "chat.messages[0].content"),
    ],
)
def test_names_the_field_that_is_not_utf8(message: pb.GenerateRequest, field: str) -> None:
    data = with_invalid_text(message)
    assert find_invalid_text(pb.GenerateRequest.DESCRIPTOR, data) == field
    found = tolerant(pb.GenerateRequest.FromString, METHOD)(data)
    assert isinstance(found, Malformed)
    assert found.error.field == field


@pytest.mark.parametrize("data", [b"\x12", b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x0f\x0f", b"\x80"])
def test_other_damage_is_said_without_a_field(data: bytes) -> None:
    found = tolerant(pb.GenerateRequest.FromString, METHOD)(data)
    assert isinstance(found, Malformed)
    assert found.error.field == "request"


def test_a_good_message_passes() -> None:
    message = pb.GenerateRequest(text="hello")
    assert tolerant(pb.GenerateRequest.FromString, METHOD)(message.SerializeToString()) == message
