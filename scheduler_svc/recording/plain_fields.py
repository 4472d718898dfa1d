"""Fields that a dataclass and its record have in common, found by name: nobody can forget one. Knows no scheduler.

A field of the dataclass that its record does not have is an error when this module's user is imported, so a new field cannot
join the core without joining recordings, or being named as one of those that are written another way.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message


class PlainFields:
    """Of one dataclass and its record.

    Args:
        kind: the dataclass.
        record: the message.
        elsewhere: fields that are written another way, or decide nothing.
    """

    def __init__(self, kind: Any, record: type[Message], elsewhere: Iterable[str] = ()):
        """Compares the two.

        Raises:
            TypeError: a field of the dataclass is nowhere.
        """
        names = {field.name for field in dataclasses.fields(kind)}
        others = frozenset(elsewhere)
        found = record.DESCRIPTOR.fields_by_name
        if gone := sorted(others - names):
            raise TypeError(f"{kind.__name__} has no fields {', '.join(gone)}")
        if missing := sorted((names - others).difference(found)):
            raise TypeError(
                f"{', '.join(missing)} of {kind.__name__} is not in recordings: it needs a field of that name in "
                f"{record.DESCRIPTOR.full_name}, or code that writes it another way"
            )
        self._optional = {name: found[name].has_presence for name in sorted(names - others)}

    def write(self, value: object, record: Message) -> None:
        """Into the record; None is not set."""
        for name in self._optional:
            if (found := getattr(value, name)) is not None:
                setattr(record, name, found)

    def read(self, record: Message) -> dict[str, Any]:
        """Arguments for the dataclass; what is not set is None."""
        return {
            name: getattr(record, name) if not is_optional or record.HasField(name) else None
            for name, is_optional in self._optional.items()
        }
