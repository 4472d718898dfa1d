"""Digests of what a core decided, so that two runs can be compared without keeping either. Pure.

Two numbers of 32 bits: which sequences do what, and on which device blocks. Never 0, which stands for nothing.
"""

import array
from collections.abc import Iterable, Sequence

import xxhash

from common.errors import OctavoError
from common.ids import BlockId
from scheduler_svc.core.plan import SequenceUpdate, StepPlan
from scheduler_svc.core.request import FinishReason, Request

Digests = tuple[int, int]
NOTHING: Digests = (0, 0)
_REASONS: dict[FinishReason | None, int] = {None: 0, **{reason: number for number, reason in enumerate(FinishReason, 1)}}


def of_numbers(numbers: Iterable[int]) -> int:
    """Of integers that fit 64 bits."""
    return xxhash.xxh32_intdigest(array.array("q", numbers).tobytes()) or 1


def of_error(error: OctavoError) -> Digests:
    """Of a refusal, by its class."""
    return xxhash.xxh32_intdigest(type(error).__name__.encode()) or 1, 0


def of_plan(plan: StepPlan | None) -> Digests:
    """Of a step."""
    if plan is None:
        return NOTHING
    who = [plan.step_id, len(plan.dropped_seq_ids), *plan.dropped_seq_ids, len(plan.new_sequences), len(plan.chunks)]
    blocks: list[int] = []
    for new in plan.new_sequences:
        who += (new.seq_id, len(new.token_ids), new.num_prompt_tokens, new.num_computed_tokens)
        blocks += new.block_ids
    for copy in plan.block_copies:
        blocks += (copy.source, copy.destination)
    for chunk in plan.chunks:
        who += (chunk.seq_id, chunk.num_tokens)
        if chunk.new_block_ids:
            blocks += (-chunk.seq_id, *chunk.new_block_ids)
    return of_numbers(who), of_numbers(blocks)


def of_transfer(transfer_id: int, block_ids: Sequence[BlockId]) -> Digests:
    """Of a load or a save."""
    return of_numbers((transfer_id, len(block_ids))), of_numbers(block_ids)


def of_updates(updates: Iterable[SequenceUpdate]) -> Digests:
    """Of the news of a step."""
    numbers: list[int] = []
    for update in updates:
        numbers += (update.seq_id, update.index, len(update.token_ids), _REASONS[update.finish_reason])
    return (of_numbers(numbers), 0) if numbers else NOTHING


def of_requests(numbers: Sequence[int], requests: Sequence[Request]) -> Digests:
    """Of requests that were taken out, by their numbers and by what was drawn of each."""
    drawn = [-1 if one is None else len(one) for request in requests for one in request.generated]
    return (of_numbers([*numbers, *drawn]), 0) if requests else NOTHING
