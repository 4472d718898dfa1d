"""What goes down: what is used again, even if it was evicted in between; never what is used once."""

from hypothesis import given
from hypothesis import strategies as st

from common.ids import BlockKey
from kvstore_svc.core.admission import Admission


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(32, "big")) for number in numbers]


def test_the_second_turn_of_a_chat_brings_its_history_down() -> None:
    admission = Admission(2, 100)
    assert admission.touch(keys(1, 2, 3)) == []  # the first turn is committed

    assert admission.touch(keys(1, 2, 3)) == keys(1, 2, 3)  # the second one looks it up
    assert admission.touch(keys(4, 5)) == []  # and commits its own


def test_blocks_stay_worthy() -> None:
    admission = Admission(2, 100)
    for _ in range(2):
        admission.touch(keys(1))

    assert admission.touch(keys(1)) == keys(1)


def test_one_touch_can_be_enough() -> None:
    assert Admission(1, 100).touch(keys(2, 1)) == keys(2, 1)


def test_the_key_that_was_not_touched_for_longest_is_forgotten_first() -> None:
    admission = Admission(2, 2)
    admission.touch(keys(1, 2))
    admission.touch(keys(3))

    assert admission.touch(keys(1)) == []
    assert admission.touch(keys(3)) == keys(3)


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=30), st.integers(1, 4), st.integers(1, 12))
def test_memory_is_bounded_and_nothing_is_worthy_too_early(calls: list[list[int]], num_touches: int, max_keys: int) -> None:
    admission = Admission(num_touches, max_keys)
    num_seen: dict[BlockKey, int] = {}
    for call in calls:
        for key in keys(*call):
            num_seen[key] = num_seen.get(key, 0) + 1
        worthy = admission.touch(keys(*call))
        assert all(num_seen[key] >= num_touches for key in worthy)
        if max_keys >= 10:
            assert {key for key in keys(*call) if num_seen[key] >= num_touches} == set(worthy)
        assert admission.num_keys <= max_keys
