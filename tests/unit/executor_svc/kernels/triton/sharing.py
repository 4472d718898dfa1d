"""Steps whose decodes share blocks, and the arrays that say so."""

import dataclasses
from collections.abc import Sequence

import torch

from executor_svc.core.prefix_groups import MAX_GROUPS
from executor_svc.kernels.batch import SharedPrefixes
from tests.unit.executor_svc.kernels.batches import Step


def share(step: Step, groups: Sequence[tuple[Sequence[int], int]], num_decodes: int | None = None) -> Step:
    """The step with, for each (decodes, tokens) of groups, the first decode's leading blocks in all of the group's tables.

    The first decode must have more tokens than the blocks of those that are shared. Lengths of groups must be multiples of the
    kernels' tiles. num_decodes: of the arrays; None: as many as the batch has.
    """
    batch = step.batch
    num_decodes = batch.num_decodes if num_decodes is None else num_decodes
    tables = batch.block_tables.clone()
    members: list[int] = []
    lens, ends = torch.zeros(MAX_GROUPS, dtype=torch.int32), torch.zeros(MAX_GROUPS, dtype=torch.int32)
    own_starts = torch.zeros(num_decodes, dtype=torch.int32)
    for number, (decodes, tokens) in enumerate(groups):
        num_blocks = -(-tokens // batch.block_size)
        assert all(int(batch.seq_lens[decode]) > num_blocks * batch.block_size for decode in decodes)
        tables[list(decodes), :num_blocks] = tables[decodes[0], :num_blocks]
        members += decodes
        lens[number] = tokens
        own_starts[list(decodes)] = tokens
        ends[number:] = len(members)
    places = torch.full((num_decodes,), 2**30, dtype=torch.int32)
    places[: len(members)] = torch.tensor(members, dtype=torch.int32)
    shared = SharedPrefixes(lens, ends, places, own_starts)
    return dataclasses.replace(step, batch=dataclasses.replace(batch, block_tables=tables, shared=shared))
