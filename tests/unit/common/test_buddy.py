"""The buddy allocator: what it hands out, how it merges, and that nothing is lost or handed out twice."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.buddy import BuddyAllocator, Run


def test_new_allocator_is_one_free_run_of_any_length() -> None:
    for num_units in (1, 2, 3, 12, 100, 1023):
        buddy = BuddyAllocator(num_units)

        assert (buddy.num_free_units, buddy.largest_free_run, buddy.num_free_runs) == (num_units, num_units, 1)
        assert buddy.mean_free_run == num_units
        assert buddy.allocate(num_units) == 0
        assert (buddy.num_free_units, buddy.largest_free_run, buddy.num_free_runs, buddy.mean_free_run) == (0, 0, 0, 0.0)
        buddy.check_integrity()


def test_tail_of_a_chunk_is_given_back() -> None:
    buddy = BuddyAllocator(16)

    assert buddy.allocate(5) == 0

    assert buddy.num_free_units == 11
    assert buddy.allocate(3) == 8  # the smallest chunk of at least 3 units is 8..11 cut from 8..15; 5..7 is no aligned chunk
    assert buddy.allocate(2) == 6
    assert buddy.allocate(1) == 5
    buddy.check_integrity()


def test_smallest_chunk_that_fits_is_taken() -> None:
    buddy = BuddyAllocator(16)
    assert buddy.allocate(16) == 0
    buddy.free(0, 8)
    buddy.free(12, 2)

    assert buddy.allocate(2) == 12
    assert buddy.allocate(2) == 0


def test_run_across_chunks_that_are_no_buddies_is_found() -> None:
    buddy = BuddyAllocator(16)
    buddy.allocate(16)
    buddy.free(6, 4)

    assert buddy.largest_free_run == 4
    assert buddy.allocate(4) == 6


def test_buddies_merge_whatever_the_order_of_freeing() -> None:
    buddy = BuddyAllocator(64)
    units = [buddy.allocate() for _ in range(64)]
    random.Random(1).shuffle(units)

    for unit in units:
        assert unit is not None
        buddy.free(unit)
        buddy.check_integrity()

    assert buddy.allocate(64) == 0


def test_no_run_is_none_and_takes_nothing() -> None:
    buddy = BuddyAllocator(8)
    buddy.allocate(8)
    for unit in (0, 2, 4, 6):
        buddy.free(unit)

    assert buddy.allocate(2) is None
    assert buddy.allocate_runs(5) is None
    assert buddy.num_free_units == 4
    assert buddy.mean_free_run == 1.0


def test_runs_are_few_and_longest_first() -> None:
    buddy = BuddyAllocator(32)
    buddy.allocate(32)
    buddy.free(1, 1)
    buddy.free(8, 4)
    buddy.free(20, 9)

    assert buddy.allocate_runs(13) == [Run(20, 9), Run(8, 4)]
    assert buddy.allocate_runs(2) is None
    assert buddy.allocate_runs(1) == [Run(1, 1)]
    assert buddy.num_free_units == 0


def test_block_behind_the_last_can_be_asked_for() -> None:
    buddy = BuddyAllocator(10)
    assert buddy.allocate(3) == 0

    assert buddy.allocate_at(3)
    assert not buddy.allocate_at(3)
    assert buddy.allocate_at(4, 6)
    assert not buddy.allocate_at(10)
    buddy.check_integrity()


@pytest.mark.parametrize(("start", "num_units"), [(-1, 1), (8, 1), (7, 2), (0, 0), (0, -1)])
def test_freeing_out_of_range_names_the_range(start: int, num_units: int) -> None:
    buddy = BuddyAllocator(8)
    buddy.allocate(8)

    with pytest.raises(ValueError, match=f"units {start} to .*0 to 7"):
        buddy.free(start, num_units)
    assert buddy.num_free_units == 0


def test_double_free_names_the_unit_and_frees_nothing() -> None:
    buddy = BuddyAllocator(8)
    buddy.allocate(8)
    buddy.free(3)

    with pytest.raises(ValueError, match="unit 3 "):
        buddy.free(2, 4)
    assert buddy.num_free_units == 1
    buddy.check_integrity()


def test_nonsense_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="num_units is 0"):
        BuddyAllocator(0)
    with pytest.raises(ValueError, match="num_units is 0"):
        BuddyAllocator(1).allocate(0)
    with pytest.raises(ValueError, match="num_units"):
        BuddyAllocator(1).allocate_at(-1)


@given(num_units=st.integers(1, 200), lengths=st.lists(st.integers(1, 40), max_size=30), seed=st.integers(0, 1000))
@settings(max_examples=100)
def test_allocate_fails_only_when_no_run_is_that_long(num_units: int, lengths: list[int], seed: int) -> None:
    buddy = BuddyAllocator(num_units)
    rng = random.Random(seed)
    held: list[Run] = []
    for length in lengths:
        longest = buddy.largest_free_run
        start = buddy.allocate(length)
        assert (start is not None) == (length <= longest)
        if start is not None:
            held.append(Run(start, length))
        if held and rng.random() < 0.4:
            buddy.free(*held.pop(rng.randrange(len(held))))
    buddy.check_integrity()


class BuddyMachine(RuleBasedStateMachine):
    """Random operations against a set of free units."""

    def __init__(self) -> None:
        super().__init__()
        self.buddy = BuddyAllocator(75)
        self.held: set[int] = set()

    def take(self, start: int, num_units: int) -> None:
        units = set(range(start, start + num_units))
        assert not units & self.held
        assert all(0 <= unit < 75 for unit in units)
        self.held |= units

    @rule(num_units=st.integers(1, 20))
    def allocate(self, num_units: int) -> None:
        start = self.buddy.allocate(num_units)
        if start is not None:
            self.take(start, num_units)

    @rule(start=st.integers(0, 80), num_units=st.integers(1, 6))
    def allocate_at(self, start: int, num_units: int) -> None:
        expected = start + num_units <= 75 and not self.held & set(range(start, start + num_units))
        assert self.buddy.allocate_at(start, num_units) == expected
        if expected:
            self.take(start, num_units)

    @rule(num_units=st.integers(1, 60))
    def allocate_runs(self, num_units: int) -> None:
        enough = num_units <= 75 - len(self.held)
        runs = self.buddy.allocate_runs(num_units)
        assert (runs is not None) == enough
        if runs is not None:
            assert sum(run.num_units for run in runs) == num_units
            assert [run.num_units for run in runs] == sorted((run.num_units for run in runs), reverse=True)
            for run in runs:
                self.take(*run)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_any_part(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.held)))
        num_units = 1
        while start + num_units in self.held and data.draw(st.booleans()):
            num_units += 1
        self.buddy.free(start, num_units)
        self.held -= set(range(start, start + num_units))

    @invariant()
    def figures_agree(self) -> None:
        self.buddy.check_integrity()
        assert self.buddy.num_free_units == 75 - len(self.held)
        free = {unit for run in self.buddy.free_runs() for unit in range(run.start, run.start + run.num_units)}
        assert free == set(range(75)) - self.held

    def teardown(self) -> None:
        for unit in self.held:
            self.buddy.free(unit)
        assert self.buddy.largest_free_run == 75


TestBuddyMachine = BuddyMachine.TestCase
TestBuddyMachine.settings = settings(max_examples=60, stateful_step_count=40)
