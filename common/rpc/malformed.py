"""Requests that cannot be parsed: which field is to blame. Knows the wire format of protobuf and descriptors; knows no service.

proto3 refuses a string that is not UTF-8 when it parses, and gRPC would answer INTERNAL without a word. Here the bytes are
walked once more, only after they failed, to name the field.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from common.errors import InvalidParameter


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands for a request that could not be parsed.

    Attributes:
        error: what to answer.
    """

    error: InvalidParameter


def tolerant(deserializer: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """A deserializer that gives Malformed where the given one raises.

    Args:
        deserializer: of protobuf.
        method: full name of the call, "/package.Service/Method".
    """

    def deserialize(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            return Malformed(_error(method, data))

    return deserialize


def _error(method: str, data: bytes) -> InvalidParameter:
    try:
        descriptor = descriptor_pool.Default().FindMethodByName(method.strip("/").replace("/", ".")).input_type
        field = find_invalid_text(descriptor, data)
    except (KeyError, ValueError, IndexError):
        field = None
    if field is not None:
        return InvalidParameter(field, "is not valid UTF-8")
    return InvalidParameter("request", f"{len(data)} bytes that are no message of {method}")


def find_invalid_text(descriptor: Descriptor, data: bytes) -> str | None:
    """The path of the first string field whose bytes are not UTF-8, for example "chat.messages[1].content"; None if all are.

    Raises:
        ValueError, IndexError: the bytes are damaged in another way.
    """
    counts: dict[int, int] = {}
    for number, value in _length_delimited(data):
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        name = field.name
        if field.is_repeated:
            counts[number] = counts.get(number, -1) + 1
            name = f"{name}[{counts[number]}]"
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                value.decode()
            except UnicodeDecodeError:
                return name
        elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            inner = find_invalid_text(field.message_type, value)
            if inner is not None:
                return f"{name}.{inner}"
    return None


def _length_delimited(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of the length-delimited fields of a message."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        match tag & 7:
            case 0:
                _, position = _varint(data, position)
            case 1:
                position += 8
            case 5:
                position += 4
            case 2:
                length, position = _varint(data, position)
                if position + length > len(data):
                    raise ValueError("a field beyond the end")
                yield tag >> 3, data[position : position + length]
                position += length
            case other:
                raise ValueError(f"wire type {other}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
