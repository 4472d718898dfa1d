"""Who is preempted: of the younger half the one with the least work to lose, never one that has not got on since last time."""

import pytest

from common.ids import RequestId, SeqId
from scheduler_svc.core.block_table import BlockTable
from scheduler_svc.core.preemption import STORED_TOKEN, choose_victim, lost_tokens
from scheduler_svc.core.request import Request, SamplingParams, StopConditions
from scheduler_svc.core.sequence import Sequence
from tests.unit.scheduler_svc.core.rig import ROOT


def make_sequence(number: int, num_planned_tokens: int, *, is_protected: bool = False) -> Sequence:
    request = Request(RequestId("r"), (1,), SamplingParams(), StopConditions(9), ROOT, 0.0)
    sequence = Sequence(SeqId(number), request, 0, (number, 0), [1], [], False, BlockTable(4), 10)
    sequence.become_running([], 0, num_planned_tokens)
    if is_protected:
        sequence.protect()
    return sequence


def victim_of(work: list[int], protected: set[int] | None = None) -> int | None:
    sequences = [make_sequence(i, tokens, is_protected=i in (protected or set())) for i, tokens in enumerate(work)]
    victim = choose_victim(sequences)
    return None if victim is None else victim.seq_id


def test_least_work_of_the_younger_half_is_lost() -> None:
    assert victim_of([1, 1, 50, 30, 40]) == 3
    assert victim_of([1, 9, 8]) == 2


def test_youngest_of_equals_goes() -> None:
    assert victim_of([5, 5, 5, 5]) == 3


def test_protected_ones_are_spared() -> None:
    assert victim_of([50, 60, 1, 2], {2, 3}) == 1
    assert victim_of([50, 60], {0, 1}) is None


def test_nobody_younger_is_nobody() -> None:
    assert victim_of([]) is None


def test_tokens_that_the_store_has_cost_little() -> None:
    stored, fresh = make_sequence(1, 48), make_sequence(2, 20)
    stored.num_offered = 11
    assert lost_tokens(fresh) == 20
    assert lost_tokens(stored) == pytest.approx(4 + 44 * STORED_TOKEN)
    assert choose_victim([make_sequence(0, 1), stored, fresh]) is stored
