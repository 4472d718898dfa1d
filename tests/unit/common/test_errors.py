"""The error tree: complete in its drawing, one reason each."""

from collections.abc import Iterator

import pytest

from common import errors
from common.errors import InvalidParameter, OctavoError, PromptTooLong


def all_classes(error_class: type[OctavoError] = OctavoError) -> Iterator[type[OctavoError]]:
    yield error_class
    for subclass in error_class.__subclasses__():
        yield from all_classes(subclass)


def test_the_drawing_shows_every_class_at_its_depth() -> None:
    drawn: dict[str, int] = {}
    for line in (errors.__doc__ or "").splitlines():
        before, _, after = line.rpartition("── ")
        if after and before is not line:
            drawn[after.split()[0]] = len(before) // 4 + 1
    drawn["OctavoError"] = 0

    depths = {c.__name__: len([base for base in c.__mro__ if issubclass(base, OctavoError)]) - 1 for c in all_classes()}

    assert {name: depth for name, depth in drawn.items() if name in depths} == depths


def test_every_reason_belongs_to_one_class() -> None:
    reasons = [error_class.reason for error_class in all_classes()]

    assert len(reasons) == len(set(reasons))


def test_every_class_says_when_it_is_raised() -> None:
    assert [c.__name__ for c in all_classes() if not c.__doc__ or ("Attributes" in c.__doc__ and c is not OctavoError)] == []


@pytest.mark.parametrize("error_class", [InvalidParameter, PromptTooLong])
def test_a_bad_parameter_names_its_field(error_class: type[InvalidParameter]) -> None:
    error = error_class("temperature", "must be at most 2, is 3", metadata={"limit": "2"})

    assert error.message == "temperature: must be at most 2, is 3"
    assert error.metadata == {"field": "temperature", "limit": "2"}
