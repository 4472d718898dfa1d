"""Steps padded to the shapes of graphs: what is there stays as it is, and padding touches nothing."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.core.prefix_groups import MAX_GROUPS, PrefixGroups
from executor_svc.cuda.graph_shapes import NUM_CHUNKS, GraphShape, GraphShapes, StepNumbers

SHAPES = GraphShapes(max_num_seqs=100, max_num_batched_tokens=700)
SPARE = 100


def make_step(num_decodes: int, chunk_lens: list[int], samples: list[bool]) -> StepNumbers:
    lens = np.array([1] * num_decodes + chunk_lens)
    num_tokens = int(lens.sum())
    return StepNumbers(
        input_ids=np.arange(1, num_tokens + 1),
        positions=np.arange(num_tokens) + 1000,
        slot_mapping=np.arange(num_tokens) + 2000,
        rows=np.arange(len(lens)) + 3,
        samples=np.array(samples, np.bool_),
        cu_seqlens_q=np.concatenate([[0], lens.cumsum()]).astype(np.int32),
        seq_lens=(lens + 5).astype(np.int32),
        block_tables=np.zeros((len(lens), 2), np.int32),
        num_decodes=num_decodes,
    )


@given(st.data())
def test_a_padded_step_says_of_its_sequences_what_the_step_says(data: st.DataObject) -> None:
    num_decodes = data.draw(st.integers(0, 100))
    chunk_lens = data.draw(st.lists(st.integers(2, 40), max_size=NUM_CHUNKS if num_decodes < 80 else 0))
    if num_decodes + len(chunk_lens) == 0:
        return
    count = num_decodes + len(chunk_lens)
    step = make_step(num_decodes, chunk_lens, data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    shape = SHAPES.fit(num_decodes, len(chunk_lens), sum(chunk_lens))
    assert shape is not None and shape in SHAPES.shapes

    ids, positions, slots, indices, rows, ends, seq_lens = step.padded(shape, SPARE)

    assert [len(ids), len(positions), len(slots)] == [shape.all_tokens] * 3
    assert [len(indices), len(rows), len(seq_lens), len(ends) - 1] == [shape.num_rows] * 4
    sequences = [*range(num_decodes), *(shape.num_decodes + i for i in range(len(chunk_lens)))]
    for number, place in enumerate(sequences):
        tokens = slice(step.cu_seqlens_q[number], step.cu_seqlens_q[number + 1])
        padded = slice(ends[place], ends[place + 1])
        for column, of_step in ((ids, step.input_ids), (positions, step.positions), (slots, step.slot_mapping)):
            assert column[padded].tolist() == of_step[tokens].tolist()
        assert seq_lens[place] == step.seq_lens[number]
    padding = sorted(set(range(shape.num_rows)) - set(sequences))
    assert not seq_lens[padding].any()
    assert (np.diff(ends)[: shape.num_decodes] == 1).all()
    assert not np.diff(ends)[[place for place in padding if place >= shape.num_decodes]].any()
    assert np.count_nonzero(slots >= 0) == len(step.input_ids)
    places = step.places(shape)
    assert rows[places].tolist() == step.rows[step.samples].tolist()
    assert (np.delete(rows, places) == SPARE).all()
    last = [step.input_ids[step.cu_seqlens_q[i + 1] - 1] for i in np.flatnonzero(step.samples)]
    assert ids[indices[places]].tolist() == last


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        ((1, 0, 0), GraphShape(1)),
        ((3, 0, 0), GraphShape(4)),
        ((97, 0, 0), GraphShape(100)),
        ((1, 1, 641), GraphShape(16, NUM_CHUNKS, 700)),
        ((0, 1, 65), GraphShape(0, NUM_CHUNKS, 128)),
        ((17, 3, 64), GraphShape(64, NUM_CHUNKS, 128)),
        ((1, NUM_CHUNKS + 1, 64), None),
        ((1, 1, 701), None),
        ((101, 0, 0), None),
    ],
)
def test_the_smallest_shape_with_room_is_taken(step: tuple[int, int, int], shape: GraphShape | None) -> None:
    assert SHAPES.fit(*step) == shape


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        ((2, 0, 0), GraphShape(8, num_groups=MAX_GROUPS)),
        ((33, 0, 0), GraphShape(48, num_groups=MAX_GROUPS)),
        ((97, 0, 0), GraphShape(100, num_groups=MAX_GROUPS)),
        ((3, 1, 65), GraphShape(64, NUM_CHUNKS, 128, MAX_GROUPS)),
        ((65, 1, 129), GraphShape(100, NUM_CHUNKS, 256, MAX_GROUPS)),
        ((2, NUM_CHUNKS + 1, 64), None),
        ((101, 0, 0), None),
    ],
)
def test_groups_have_shapes_of_their_own(step: tuple[int, int, int], shape: GraphShape | None) -> None:
    assert SHAPES.fit(*step, with_groups=True) == shape
    assert shape is None or shape in SHAPES.shapes


@pytest.mark.parametrize("groups", [True, False])
def test_a_shape_with_groups_has_their_arrays_at_the_end(groups: bool) -> None:
    step = make_step(3, [4], [True] * 4)
    found = PrefixGroups(np.array([512], np.int32), np.array([2], np.int32), np.array([2, 0], np.int32)) if groups else None
    step = dataclasses.replace(step, groups=found)
    plain = step.padded(GraphShape(8, NUM_CHUNKS, 128), SPARE)
    *same, lens, ends, members, own_starts = step.padded(GraphShape(8, NUM_CHUNKS, 128, MAX_GROUPS), SPARE)
    assert all(np.array_equal(one, other) for one, other in zip(plain, same, strict=True))
    assert lens.tolist() == [512 * groups] + [0] * (MAX_GROUPS - 1) and ends.tolist() == [2 * groups] * MAX_GROUPS
    assert members.tolist() == ([2, 0] if groups else [0, 0]) + [0] * 6
    assert own_starts.tolist() == ([512, 0, 512] if groups else [0, 0, 0]) + [0] * 5


def test_decodes_come_first_and_of_either_kind_those_of_most_work() -> None:
    order = [(shape.num_chunks, -shape.all_tokens) for shape in SHAPES.shapes]
    assert order == sorted(order)
    assert len(set(SHAPES.shapes)) == len(SHAPES.shapes)
