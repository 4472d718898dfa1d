"""The running batch: deltas in their order, packing without padding, and sequences that fail alone."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidParameter
from common.ids import BlockId, SeqId
from executor_svc.core.batch import BatchState, PackedStep
from executor_svc.core.plan import BatchLimits, Chunk, NewSequence, StepPlan

LIMITS = BatchLimits(num_blocks=32, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=24, vocab_size=100)


def make_state(limits: BatchLimits = LIMITS) -> BatchState[str]:
    return BatchState(limits)


def make_new(
    seq_id: int, token_ids: Sequence[int], block_ids: Sequence[int], *, num_computed: int = 0, num_prompt: int | None = None
) -> NewSequence[str]:
    return NewSequence(
        seq_id=SeqId(seq_id),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt is None else num_prompt,
        num_computed_tokens=num_computed,
        block_ids=[BlockId(i) for i in block_ids],
        sampling=f"sampling of {seq_id}",
    )


def make_chunk(seq_id: int, num_tokens: int, new_block_ids: Sequence[int] = ()) -> Chunk:
    return Chunk(SeqId(seq_id), num_tokens, [BlockId(i) for i in new_block_ids])


def run(state: BatchState[str], plan: StepPlan[str], *, token: int = 7) -> tuple[PackedStep[str] | None, list[str]]:
    """Carries a plan out as the runner does; every sampled token is `token`."""
    chunks, failures = state.apply(plan)
    packed = state.pack(chunks) if chunks else None
    for chunk in chunks:
        state.advance(chunk)
        if chunk.samples:
            state.append_token(chunk.sequence.seq_id, token)
    state.check_integrity()
    return packed, [failure.message for failure in failures]


def test_a_prompt_is_packed_with_its_positions_and_slots() -> None:
    state = make_state()

    packed, failures = run(
        state, StepPlan(1, new_sequences=[make_new(1, [11, 12, 13, 14, 15], [9, 4])], chunks=[make_chunk(1, 5)])
    )

    assert failures == []
    assert packed is not None
    assert packed.input_ids.tolist() == [11, 12, 13, 14, 15]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4]
    assert packed.slot_mapping.tolist() == [36, 37, 38, 39, 16]
    assert packed.cu_seqlens_q.tolist() == [0, 5]
    assert packed.seq_lens.tolist() == [5]
    assert packed.block_tables.tolist() == [[9, 4]]
    assert packed.sample_indices.tolist() == [4]
    assert packed.num_decodes == 0


def test_decodes_come_first_and_keep_the_order_of_the_plan() -> None:
    state = make_state()
    run(
        state,
        StepPlan(1, new_sequences=[make_new(1, [1], [0]), make_new(2, [2], [1])], chunks=[make_chunk(1, 1), make_chunk(2, 1)]),
    )

    plan = StepPlan(
        2, new_sequences=[make_new(3, [31, 32, 33], [2])], chunks=[make_chunk(3, 2), make_chunk(2, 1), make_chunk(1, 1)]
    )
    packed, _ = run(state, plan)

    assert packed is not None
    assert [chunk.sequence.seq_id for chunk in packed.chunks] == [2, 1, 3]
    assert packed.num_decodes == 2
    assert packed.input_ids.tolist() == [7, 7, 31, 32]
    assert packed.cu_seqlens_q.tolist() == [0, 1, 2, 4]
    assert packed.seq_lens.tolist() == [2, 2, 2]
    assert packed.known_lens.tolist() == [2, 2, 3]
    assert packed.sample_indices.tolist() == [0, 1], "the chunk that does not reach the end of the prompt samples nothing"


def test_a_decode_may_be_planned_before_its_token_is_out() -> None:
    """Run-ahead: the token sampled in step n is known in step n + 1 without anybody telling."""
    state = make_state()
    run(state, StepPlan(1, new_sequences=[make_new(1, [5, 6], [3])], chunks=[make_chunk(1, 2)]), token=42)

    packed, failures = run(state, StepPlan(2, chunks=[make_chunk(1, 1)]))

    assert failures == []
    assert packed is not None
    assert packed.input_ids.tolist() == [42]
    assert packed.positions.tolist() == [2]
    assert state.token_ids(SeqId(1)).tolist() == [5, 6, 42, 7]


def test_chunks_cover_what_one_pass_covers() -> None:
    """The same tokens, positions and slots, whatever the sizes of the chunks."""
    prompt = list(range(20, 33))
    whole, _ = run(make_state(), StepPlan(1, new_sequences=[make_new(1, prompt, [5, 1, 8, 2])], chunks=[make_chunk(1, 13)]))
    state = make_state()
    parts = []
    for step, (num_tokens, blocks) in enumerate([(1, [5]), (5, [1]), (7, [8, 2])], start=1):
        new = [make_new(1, prompt, [])] if step == 1 else []
        packed, failures = run(state, StepPlan(step, new_sequences=new, chunks=[make_chunk(1, num_tokens, blocks)]))
        assert failures == []
        parts.append(packed)

    assert whole is not None
    for field in ("input_ids", "positions", "slot_mapping"):
        assert np.concatenate([getattr(part, field) for part in parts]).tolist() == getattr(whole, field).tolist()


def test_computed_tokens_are_not_computed_again() -> None:
    state = make_state()
    new = make_new(1, [1, 2, 3, 4, 5, 6], [7, 8], num_computed=4)

    packed, _ = run(state, StepPlan(1, new_sequences=[new], chunks=[make_chunk(1, 2)]))

    assert packed is not None
    assert packed.positions.tolist() == [4, 5]
    assert packed.seq_lens.tolist() == [6]


def test_drops_come_before_new_sequences() -> None:
    """A full batch takes a new sequence in the plan that drops an old one, on the old one's blocks."""
    state = make_state()
    news = [make_new(i, [i], [i]) for i in range(4)]
    run(state, StepPlan(1, new_sequences=news, chunks=[make_chunk(i, 1) for i in range(4)]))

    plan = StepPlan(2, dropped_seq_ids=[SeqId(0)], new_sequences=[make_new(9, [50, 51], [0])], chunks=[make_chunk(9, 2)])
    packed, failures = run(state, plan)

    assert failures == []
    assert packed is not None
    assert packed.block_tables.tolist() == [[0]]
    assert SeqId(0) not in state


def test_block_tables_are_zero_beyond_a_sequences_blocks_after_its_row_was_used_by_a_longer_one() -> None:
    state = make_state()
    run(state, StepPlan(1, new_sequences=[make_new(1, list(range(12)), [9, 8, 7])], chunks=[make_chunk(1, 12)]))
    run(state, StepPlan(2, dropped_seq_ids=[SeqId(1)]))

    news = [make_new(2, [1], [5]), make_new(3, list(range(9)), [1, 2, 3])]
    packed, _ = run(state, StepPlan(3, new_sequences=news, chunks=[make_chunk(2, 1), make_chunk(3, 9)]))

    assert packed is not None
    assert packed.block_tables.tolist() == [[5, 0, 0], [1, 2, 3]]


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (make_new(1, [], []), "0 tokens"),
        (make_new(1, [1] * 25, []), "25 tokens"),
        (make_new(1, [1, 100], [0]), "vocabulary of 100"),
        (make_new(1, [1, 2], [0], num_prompt=3), "num_prompt_tokens: 3"),
        (make_new(1, [1, 2], [0], num_computed=2), "num_computed_tokens: 2"),
        (make_new(1, [1] * 6, [0], num_computed=5), "do not fit in 1 blocks"),
        (make_new(1, [1, 2], [32]), "32 blocks"),
        (make_new(1, [1, 2], [0] * 9), "at most 7"),
    ],
)
def test_a_bad_new_sequence_fails_alone(new: NewSequence[str], message: str) -> None:
    state = make_state()
    plan = StepPlan(1, new_sequences=[new, make_new(2, [3], [1])], chunks=[make_chunk(1, 1), make_chunk(2, 1)])

    packed, failures = run(state, plan)

    assert packed is not None
    assert [chunk.sequence.seq_id for chunk in packed.chunks] == [2]
    assert len(failures) == 1
    assert message in failures[0]


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (make_chunk(99, 1), "unknown sequence 99"),
        (make_chunk(1, 0), "0 tokens, expected 1..6"),
        (make_chunk(1, 7), "7 tokens, expected 1..6"),
        (make_chunk(1, 5), "position 4 has no slot in 1 blocks"),
        (make_chunk(1, 5, [40]), "32 blocks"),
    ],
)
def test_a_bad_chunk_fails_its_sequence_alone(chunk: Chunk, message: str) -> None:
    state = make_state()
    news = [make_new(1, [1, 2, 3, 4, 5, 6], [0]), make_new(2, [3], [1])]

    packed, failures = run(state, StepPlan(1, new_sequences=news, chunks=[chunk, make_chunk(2, 1)]))

    assert packed is not None
    assert [c.sequence.seq_id for c in packed.chunks] == [2]
    assert len(failures) == 1
    assert message in failures[0]


def test_a_position_beyond_the_model_fails_its_sequence() -> None:
    state = make_state()
    run(state, StepPlan(1, new_sequences=[make_new(1, [1] * 24, range(7), num_computed=20)], chunks=[make_chunk(1, 4)]))

    _, failures = run(state, StepPlan(2, chunks=[make_chunk(1, 1)]))

    assert failures == ["plan.chunks: position 24 is beyond the model's 24 tokens"]


def test_a_failed_sequence_is_reported_once_until_it_is_dropped() -> None:
    """Plans that are on their way already may still name it."""
    state = make_state()
    run(state, StepPlan(1, new_sequences=[make_new(1, [1], [0])], chunks=[make_chunk(1, 1)]))
    state.fail(SeqId(1), "poisoned")

    assert run(state, StepPlan(2, chunks=[make_chunk(1, 1)])) == (None, [])
    assert run(state, StepPlan(3, dropped_seq_ids=[SeqId(1)])) == (None, [])
    assert run(state, StepPlan(4, chunks=[make_chunk(1, 1)]))[1] == ["plan.chunks: unknown sequence 1"]


def test_more_sequences_than_seats_fail_alone() -> None:
    state = make_state()

    _, failures = run(state, StepPlan(1, new_sequences=[make_new(i, [1], [i]) for i in range(5)]))

    assert failures == ["more than 4 sequences at once (max_num_seqs)"]
    assert len(state) == 4


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (StepPlan(3), "plan.step_id"),
        (StepPlan(2, new_sequences=[make_new(1, [1], [0])]), "plan.new_sequences"),
        (StepPlan(2, new_sequences=[make_new(5, [1], [0]), make_new(5, [1], [0])]), "plan.new_sequences"),
        (StepPlan(2, chunks=[make_chunk(1, 1), make_chunk(1, 1)]), "plan.chunks"),
        (StepPlan(2, chunks=[make_chunk(1, 17)]), "plan.chunks"),
        (StepPlan(2, block_copies=[(BlockId(0), BlockId(32))]), "plan.block_copies"),
        (StepPlan(2, dropped_seq_ids=[SeqId(1), SeqId(1)]), "plan.dropped_seq_ids"),
    ],
)
def test_a_plan_that_makes_no_sense_changes_nothing(plan: StepPlan[str], field: str) -> None:
    state = make_state()
    run(state, StepPlan(1, new_sequences=[make_new(1, [1], [0])], chunks=[make_chunk(1, 1)]))

    with pytest.raises(InvalidParameter) as caught:
        state.apply(plan)

    assert caught.value.field == field
    state.check_integrity()
    assert run(state, StepPlan(2, chunks=[make_chunk(1, 1)]))[1] == []


def test_clear_starts_a_new_session() -> None:
    state = make_state()
    run(state, StepPlan(1, new_sequences=[make_new(1, [1], [3])], chunks=[make_chunk(1, 1)]))

    state.clear()

    assert len(state) == 0
    assert run(state, StepPlan(1, new_sequences=[make_new(1, [1], [3])]))[1] == []


@settings(max_examples=60)
@given(data=st.data())
def test_random_schedules_pack_what_a_plain_loop_packs(data: st.DataObject) -> None:
    """Whatever is scheduled, the packed arrays are those of a token-by-token loop, and no row is lost."""
    state = make_state()
    tokens: dict[int, list[int]] = {}
    tables: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    next_id = 0
    for step in range(1, 12):
        dropped = [i for i in list(tokens) if data.draw(st.integers(0, 5)) == 0 or len(tokens[i]) > 20]
        for i in dropped:
            del tokens[i], tables[i], computed[i]
        news = []
        while len(tokens) < LIMITS.max_num_seqs and data.draw(st.booleans()):
            tokens[next_id] = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=10))
            tables[next_id] = data.draw(st.lists(st.integers(0, 31), min_size=0, max_size=3))
            computed[next_id] = data.draw(st.integers(0, min(len(tokens[next_id]) - 1, 4 * len(tables[next_id]))))
            news.append(make_new(next_id, list(tokens[next_id]), list(tables[next_id]), num_computed=computed[next_id]))
            next_id += 1
        budget, chunks, expected = LIMITS.max_num_batched_tokens, [], []
        for i in data.draw(st.permutations(sorted(tokens))):
            num_tokens = min(budget, data.draw(st.integers(0, len(tokens[i]) - computed[i])))
            if not num_tokens:
                continue
            budget -= num_tokens
            missing = -(-(computed[i] + num_tokens) // 4) - len(tables[i])
            extra = data.draw(st.lists(st.integers(0, 31), min_size=missing, max_size=missing)) if missing > 0 else []
            tables[i] += extra
            chunks.append(make_chunk(i, num_tokens, extra))
            expected.append((i, computed[i], num_tokens))
        packed, failures = run(state, StepPlan(step, [SeqId(i) for i in dropped], news, (), chunks), token=step)

        assert failures == []
        expected.sort(key=lambda item: item[2] != 1)
        rows = [(i, p) for i, start, num_tokens in expected for p in range(start, start + num_tokens)]
        if packed is not None:
            assert packed.input_ids.tolist() == [tokens[i][p] for i, p in rows]
            assert packed.positions.tolist() == [p for _, p in rows]
            assert packed.slot_mapping.tolist() == [tables[i][p // 4] * 4 + p % 4 for i, p in rows]
            assert packed.seq_lens.tolist() == [start + num_tokens for _, start, num_tokens in expected]
        for i, start, num_tokens in expected:
            computed[i] = start + num_tokens
            if computed[i] == len(tokens[i]):
                tokens[i].append(step)
