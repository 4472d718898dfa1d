"""The decodes as they go on from step to step: order, blocks' borders and ends, whoever comes and goes meanwhile."""

import random

from common.ids import RequestId, SeqId
from scheduler_svc.core.block_table import BlockTable
from scheduler_svc.core.decodes import Decodes
from scheduler_svc.core.request import Request, SamplingParams, StopConditions
from scheduler_svc.core.sequence import Sequence
from tests.unit.scheduler_svc.core.rig import ROOT, Rig, make_config

SIZE = 4


def make_sequence(
    number: int, num_prompt_tokens: int, max_tokens: int, *, tier: int = 1, target_s: float | None = None
) -> Sequence:
    """Whose prompt is planned and whose first token is in flight."""
    prompt = tuple(range(num_prompt_tokens))
    request = Request(
        RequestId(f"r{number}"), prompt, SamplingParams(), StopConditions(max_tokens), ROOT, 0.0, tpot_target_s=target_s
    )
    table, most = BlockTable(SIZE), num_prompt_tokens + max_tokens
    sequence = Sequence(SeqId(number), request, 0, (number, 0), list(prompt), [], False, table, most)
    sequence.tier = tier
    sequence.become_running([], 0, 0)
    sequence.note_planned(num_prompt_tokens, 1, is_sampling=True)
    return sequence


def test_a_step_has_all_in_order_of_rank() -> None:
    decodes = Decodes(SIZE)
    for sequence in [make_sequence(3, 5, 9), make_sequence(1, 5, 9, tier=2), make_sequence(2, 5, 9)]:
        decodes.join(sequence)
    step = decodes.advance(2, {})
    assert [chunk.seq_id for chunk in step.chunks] == step.rows.seq_ids == [2, 3, 1]


def test_positions_move_with_every_step_and_stay_where_they_are_afterwards() -> None:
    decodes, sequence = Decodes(SIZE), make_sequence(1, 5, 9)
    decodes.join(sequence)
    for step_id in (2, 3, 4):
        decodes.advance(step_id, {})
    assert (sequence.num_planned_tokens, sequence.num_known_tokens, sequence.account.num_decodes) == (8, 9, 3)
    decodes.leave(sequence, 4)
    decodes.advance(5, {})
    assert (sequence.num_planned_tokens, sequence.num_known_tokens, sequence.account.num_decodes) == (8, 9, 3)
    assert sequence.last_step_id == 4


def test_a_sequence_is_due_for_a_block_when_its_token_is_the_first_of_one() -> None:
    decodes = Decodes(SIZE)
    decodes.join(make_sequence(1, 6, 20))
    due = []
    for step_id in range(2, 12):
        due.append([sequence.num_known_tokens for sequence in decodes.due()])
        decodes.advance(step_id, {})
    assert due == [[], [], [9], [], [], [], [13], [], [], []]


def test_a_step_says_whose_blocks_become_computed_and_known() -> None:
    decodes, sequence = Decodes(SIZE), make_sequence(1, 6, 20)
    decodes.join(sequence)
    filling, completing = [], []
    for step_id in range(2, 8):
        step = decodes.advance(step_id, {})
        filling += [sequence.num_planned_tokens] * len(step.filling)
        completing += [sequence.num_known_tokens] * len(step.completing)
    assert filling == [8, 12]
    assert completing == [8, 12]


def test_a_sequence_leaves_with_the_step_that_draws_its_last_token() -> None:
    decodes, sequence = Decodes(SIZE), make_sequence(1, 5, 3)
    decodes.join(sequence)
    assert not decodes.advance(2, {}).last
    assert decodes.advance(3, {}).last == [sequence]
    assert not sequence.is_decoding and len(decodes) == 0
    assert sequence.num_known_tokens == sequence.max_known_tokens


def test_a_step_in_flight_keeps_its_rows() -> None:
    decodes, first, second = Decodes(SIZE), make_sequence(1, 5, 9), make_sequence(2, 5, 9)
    decodes.join(first)
    step = decodes.advance(2, {})
    decodes.join(second)
    decodes.leave(first, 2)
    assert step.rows.sequences == [first]
    assert decodes.advance(3, {}).rows.sequences == [second]


def test_the_tightest_target_is_that_of_those_that_are_there() -> None:
    decodes, tight = Decodes(SIZE), make_sequence(1, 5, 9, target_s=0.1)
    assert decodes.tightest_target_s is None
    decodes.join(tight)
    decodes.join(make_sequence(2, 5, 9, target_s=0.2))
    assert decodes.tightest_target_s == 0.1
    decodes.leave(tight, 1)
    assert decodes.tightest_target_s == 0.2


def test_books_agree_whoever_comes_and_goes() -> None:
    rng, decodes = random.Random(1), Decodes(SIZE)
    here: list[Sequence] = []
    for number in range(2, 2000):
        if rng.random() < 0.4:
            here.append(make_sequence(number, rng.randint(1, 12), rng.randint(2, 30), tier=rng.randint(0, 3)))
            decodes.join(here[-1])
        if here and rng.random() < 0.1:
            decodes.leave(here.pop(rng.randrange(len(here))), number)
        decodes.advance(number, {})
        here = [sequence for sequence in here if sequence.is_decoding]
        decodes.check_integrity()
        assert len(decodes) == len(here)


def test_tokens_of_a_preempted_sequence_that_are_in_flight_count() -> None:
    rig = Rig(make_config(num_blocks=4, max_num_seqs=2, prefix_caching=False))
    rig.add([1] * 4, max_tokens=9)
    second = rig.add([2] * 4, max_tokens=9)
    while not rig.scheduler.stats().num_preemptions:
        assert rig.schedule() is not None
    tokens_before = len(rig.outputs[rig.seq_ids(second)[0]])
    while rig.plans:
        rig.apply()
    assert len(rig.outputs[rig.seq_ids(second)[0]]) > tokens_before
    rig.wind_up()
