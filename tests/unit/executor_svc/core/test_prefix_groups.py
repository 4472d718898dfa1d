"""Groups of sequences that begin with the same blocks: they do, they are worth it, and the choice is a good one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.core.prefix_groups import (
    MAX_GROUPS,
    MIN_SAVED_TOKENS,
    MIN_SHARED_TOKENS,
    SHARED_MULTIPLE,
    PrefixGroups,
    PrefixIndex,
    _best_groups,
)

BLOCK_SIZE = 16
Table = tuple[int, ...]


class Decodes:
    """The decodes of a batch, by row, as the executor hands them over."""

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        self.index = PrefixIndex(block_size)
        self.block_size = block_size
        self.tables: dict[int, Table] = {}
        self.tenancies: dict[int, int] = {}

    def set(self, row: int, table: Table) -> None:
        """A sequence with that many full blocks, and one token more, takes the row."""
        self.tables[row] = table
        self.tenancies[row] = self.tenancies.get(row, 0) + 1

    def groups(self) -> PrefixGroups | None:
        rows = np.array(list(self.tables), np.int64)
        width = max((len(table) for table in self.tables.values()), default=0) + 1
        tables = np.zeros((len(rows), width), np.int32)
        for place, table in enumerate(self.tables.values()):
            tables[place, : len(table)] = table
        lens = np.array([len(table) * self.block_size + 1 for table in self.tables.values()], np.int32)
        tenancies = np.array([self.tenancies[row] for row in rows.tolist()], np.int64)
        found = self.index.groups(rows, tenancies, lens, tables)
        if len(rows):
            self.index.check_integrity()
        return found

    def check(self, groups: PrefixGroups | None) -> int:
        """That groups are right; returns the tokens they save."""
        if groups is None:
            return 0
        members = groups.members.tolist()
        tables = list(self.tables.values())
        assert len(set(members)) == len(members)
        assert len(groups.lens) == len(groups.ends) <= MAX_GROUPS and groups.ends[-1] == len(members)
        saved = 0
        for length, begin, end in zip(groups.lens.tolist(), [0, *groups.ends.tolist()], groups.ends.tolist(), strict=False):
            assert end - begin >= 2 and length >= MIN_SHARED_TOKENS and length % SHARED_MULTIPLE == 0
            num_blocks = -(-length // self.block_size)
            heads = {tables[member][:num_blocks] for member in members[begin:end]}
            assert len(heads) == 1 and len(heads.pop()) == num_blocks
            saved += (end - begin - 1) * length
        assert saved >= MIN_SAVED_TOKENS
        return saved


def test_sequences_of_one_system_prompt_are_a_group() -> None:
    decodes = Decodes()
    shared = tuple(range(100, 612))  # 8,192 tokens
    for row in range(64):
        decodes.set(row, (*shared, 1000 + row, 2000 + row))
    decodes.set(70, (5, 6, 7))
    groups = decodes.groups()
    assert groups is not None and groups.lens.tolist() == [8192] and sorted(groups.members.tolist()) == list(range(64))
    lens, ends, members, own_starts = groups.padded(72)
    assert lens.tolist() == [8192] + [0] * (MAX_GROUPS - 1) and ends.tolist() == [64] * MAX_GROUPS
    assert members[:64].tolist() == groups.members.tolist() and len(members) == 72
    assert own_starts.tolist() == [8192] * 64 + [0] * 8


def test_of_nested_prefixes_those_are_taken_that_save_most() -> None:
    system, turns = tuple(range(1, 65)), {user: tuple(range(1000 * user, 1000 * user + 400)) for user in (1, 2)}
    decodes = Decodes()
    for row in range(40):
        decodes.set(row, (*system, *turns[1 + row % 2], 50_000 + row))
    groups = decodes.groups()
    assert groups is not None and groups.lens.tolist() == [7424, 7424]  # 464 blocks
    assert sorted(groups.members[:20].tolist()) in (list(range(0, 40, 2)), list(range(1, 40, 2)))
    for row in range(60):
        decodes.set(row, (*system, 50_000 + row))
    groups = decodes.groups()
    assert groups is not None and groups.lens.tolist() == [1024] and len(groups.members) == 60


def test_what_saves_little_is_no_group() -> None:
    decodes = Decodes()
    for row in range(200):
        decodes.set(row, (*range(31), 100 + row))  # 496 tokens
    assert decodes.groups() is None
    decodes = Decodes()
    for row in range(12):
        decodes.set(row, (*range(256), 1000 + row))
    assert decodes.groups() is None
    decodes.set(12, (*range(256), 1012))
    assert decodes.check(decodes.groups()) == 12 * 4096


def test_a_row_that_has_another_sequence_leaves_its_group() -> None:
    decodes = Decodes()
    for row in range(8):
        decodes.set(row, (*range(512), 1000 + row))
    assert len(decodes.groups().members) == 8  # type: ignore[union-attr]
    decodes.set(3, tuple(range(5000, 5600)))
    groups = decodes.groups()
    assert groups is not None and sorted(groups.members.tolist()) == [0, 1, 2, 4, 5, 6, 7]


def test_the_same_decodes_have_the_very_same_groups() -> None:
    decodes = Decodes()
    for row in range(8):
        decodes.set(row, (*range(512), 1000 + row))
    first = decodes.groups()
    for row in range(8):
        decodes.tables[row] += (9000 + row,)  # a block of its own
    assert decodes.groups() is first


def test_places_follow_the_order_of_the_batch() -> None:
    decodes = Decodes()
    for row in range(8):
        decodes.set(row, (*range(512), 1000 + row))
    decodes.groups()
    decodes.tables = {9: (7,), **dict(reversed(decodes.tables.items()))}
    decodes.tenancies[9] = 1
    groups = decodes.groups()
    decodes.check(groups)
    assert groups is not None and sorted(groups.members.tolist()) == list(range(1, 9))


def test_a_step_without_decodes_forgets_nothing() -> None:
    decodes = Decodes()
    for row in range(8):
        decodes.set(row, (*range(512), 1000 + row))
    first, tables = decodes.groups(), decodes.tables
    decodes.tables = {}
    assert decodes.groups() is None
    decodes.tables = tables
    assert decodes.groups() is first


# Tables as paths in a tree, in pieces of 512 and 640 tokens.
TABLES = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([32, 40])), max_size=4).map(
    lambda pieces: tuple(
        10_000 * number + 1000 * piece + count + i for number, (piece, count) in enumerate(pieces, start=1) for i in range(count)
    )
)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 30), TABLES | st.none()), max_size=25), max_size=6), st.sampled_from([5, 16, 64])
)
def test_groups_are_right_whoever_joins_and_leaves(steps: list[list[tuple[int, Table | None]]], block_size: int) -> None:
    decodes = Decodes(block_size)
    for changes in steps:
        for row, table in changes:
            if table is None:
                decodes.tables.pop(row, None)
            else:
                decodes.set(row, table)
        found = decodes.groups()
        decodes.check(found)
        fresh = Decodes(block_size)
        fresh.tables, fresh.tenancies = decodes.tables, decodes.tenancies
        assert fresh.check(fresh.groups()) == decodes.check(found)


@given(st.lists(st.sampled_from([0, 2, 3, 5, 9]), max_size=9))
def test_no_choice_of_whole_runs_saves_more(shared: list[int]) -> None:
    shared = [*shared, 0]
    groups = _best_groups(shared)
    covered = [place for group in groups for place in group.places]
    assert len(set(covered)) == len(covered)
    for group in groups:
        assert 0 < group.length <= min(shared[min(group.places) : max(group.places)])
    assert sum(group.saved for group in groups) >= best_of_nested(shared)


def best_of_nested(shared: list[int]) -> int:
    """Most tokens saved when each run is either taken whole or left to the runs within it."""
    if len(shared) < 2:
        return 0
    length = min(shared[:-1])
    cut = shared.index(length)
    return max((len(shared) - 1) * length, best_of_nested([*shared[:cut], 0]) + best_of_nested(shared[cut + 1 :]))


def test_those_outside_of_an_inner_group_are_a_group_too() -> None:
    decodes = Decodes()
    system = tuple(range(1, 65))
    for row in range(40):
        decodes.set(row, (*system, *(range(1000, 1400) if row % 2 else ()), 50_000 + row))
    groups = decodes.groups()
    assert groups is not None and groups.lens.tolist() == [7424, 1024] and groups.ends.tolist() == [20, 40]
    assert sorted(groups.members[20:].tolist()) == list(range(0, 40, 2))


@pytest.mark.parametrize("num_decodes", [0, 5])
def test_no_groups_are_zeros(num_decodes: int) -> None:
    none = np.zeros(0, np.int32)
    arrays = PrefixGroups(none, none, none).padded(num_decodes)
    assert [len(array) for array in arrays] == [MAX_GROUPS, MAX_GROUPS, num_decodes, num_decodes]
    assert not any(array.any() for array in arrays)
