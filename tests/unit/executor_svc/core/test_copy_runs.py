"""Neighbouring blocks travel in one copy, and together the copies are what block by block would have done."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from executor_svc.core.copy_runs import CopyRun, copy_runs, cut

BLOCK = 12
places = st.permutations(range(24)).flatmap(lambda order: st.integers(0, 24).map(lambda count: order[:count]))
nearly_sorted = st.lists(st.integers(0, 23), unique=True).map(sorted)


@given(ids=places | nearly_sorted, slots=places | nearly_sorted)
def test_runs_cover_the_blocks_in_their_order_and_are_as_long_as_can_be(ids: list[int], slots: list[int]) -> None:
    count = min(len(ids), len(slots))
    addresses = [1000 + BLOCK * slot for slot in slots[:count]]

    runs = copy_runs(ids[:count], addresses, BLOCK)

    pieces = [
        (run.pool_offset + done, run.address + done, BLOCK) for run in runs for done in range(0, run.num_bytes, BLOCK)
    ]  # fmt: skip
    assert pieces == [(BLOCK * i, address, BLOCK) for i, address in zip(ids[:count], addresses, strict=True)]
    for left, right in itertools.pairwise(runs):
        assert (left.pool_offset + left.num_bytes, left.address + left.num_bytes) != (right.pool_offset, right.address)


@given(start=st.integers(0, 50), behind=st.integers(0, 100), num_bytes=st.integers(1, 200), piece_bytes=st.integers(1, 60))
def test_no_piece_crosses_a_boundary_and_nothing_is_lost(start: int, behind: int, num_bytes: int, piece_bytes: int) -> None:
    run = CopyRun(7, start + behind, num_bytes)

    pieces = cut(run, start, piece_bytes)

    for piece in pieces:
        first, last = piece.address - start, piece.address + piece.num_bytes - 1 - start
        assert first // piece_bytes == last // piece_bytes
        assert piece.pool_offset - run.pool_offset == piece.address - run.address
    assert [piece.address for piece in pieces[1:]] == [piece.address + piece.num_bytes for piece in pieces[:-1]]
    assert (pieces[0].address, sum(piece.num_bytes for piece in pieces)) == (run.address, num_bytes)


def test_blocks_that_lie_side_by_side_are_one_copy() -> None:
    assert copy_runs([4, 5, 6, 9], [100, 112, 124, 136], BLOCK) == [CopyRun(48, 100, 36), CopyRun(108, 136, 12)]
    assert copy_runs([5, 4], [112, 100], BLOCK) == [CopyRun(60, 112, 12), CopyRun(48, 100, 12)]
