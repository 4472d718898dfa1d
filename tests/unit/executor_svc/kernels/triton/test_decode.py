"""Decode in Triton's interpreter against the float64 reference."""

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from executor_svc.core.block_address import PAGE_BYTES, page_entries
from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.triton.decode import DecodeWorkspace, paged_decode
from executor_svc.kernels.triton.decode_shared import SharedParts
from tests.unit.executor_svc.kernels.batches import Shape, Step
from tests.unit.executor_svc.kernels.triton.steps import expected, make_rows_step

CONFIG = {"tile": 64, "num_warps": 4, "stages": 2, "programs_per_sm": 3}
SHAPES = {
    "llama": Shape(8, 2, 64, 64, 16),
    "three_heads_each": Shape(9, 3, 32, 32, 16),
    "one_group": Shape(16, 1, 80, 80, 16),
    "no_groups": Shape(3, 3, 16, 16, 16),
    "values_of_another_size": Shape(4, 2, 24, 40, 16),
    "blocks_of_four": Shape(4, 2, 16, 16, 4),
    "blocks_of_five": Shape(4, 2, 16, 16, 5),
    "blocks_larger_than_tiles": Shape(2, 1, 16, 16, 64),
}


def decode(
    step: Step,
    num_ranges: int = 3,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
) -> Tensor:
    shape = (step.query.shape[0], step.query.shape[1], step.value.shape[2])
    out = torch.full(shape, float("nan"))
    workspace = workspace or DecodeWorkspace(shape[0] + 1, shape[1], shape[2], num_ranges, "cpu")
    config = {**CONFIG, "programs_per_sm": num_ranges * step.key.shape[1]}
    paged_decode(
        step.query,
        step.cache,
        step.batch.block_tables,
        step.batch.seq_lens,
        out,
        scale=0.3,
        window=window,
        softcap=softcap,
        sinks=sinks,
        workspace=workspace,
        config=config,
    )
    assert not workspace.arrived.any()
    return out


def written(step: Step) -> Step:
    """The step with its keys and values in the cache already."""
    _, cache = expected(step, scale=0.3)
    return Step(step.query, step.key, step.value, cache, step.batch)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_reference(shape: Shape) -> None:
    step = written(make_rows_step(shape, [1, 130, 17], [1, 1, 1]))
    torch.testing.assert_close(decode(step).double(), expected(step, scale=0.3)[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("num_ranges", [1, 2, 3, 7])
@pytest.mark.parametrize("seq_lens", [[700], [64, 64, 64], [1, 1, 300, 1], [65, 5, 5, 5, 5, 129]], ids=str)
def test_ranges_are_cut_anywhere(seq_lens: list[int], num_ranges: int) -> None:
    step = written(make_rows_step(Shape(2, 1, 16, 16, 16), seq_lens, [1] * len(seq_lens)))
    torch.testing.assert_close(decode(step, num_ranges).double(), expected(step, scale=0.3)[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 16, 70, 1000])
def test_windows(window: int) -> None:
    step = written(make_rows_step(Shape(4, 2, 16, 16, 16), [200, 16, 71], [1, 1, 1]))
    wanted = expected(step, scale=0.3, window=window)[0]
    torch.testing.assert_close(decode(step, window=window).double(), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("num_ranges", [1, 4])
def test_softcap_and_sinks(num_ranges: int) -> None:
    step = written(make_rows_step(Shape(4, 2, 16, 16, 16), [200, 3], [1, 1]))
    sinks = torch.randn(4)
    wanted = expected(step, scale=0.3, softcap=1.5, sinks=sinks)[0]
    out = decode(step, num_ranges, softcap=1.5, sinks=sinks)
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("num_ranges", [1, 3, 7])
@pytest.mark.parametrize("padding", [[1], [0], [4], [0, 1, 4], [2, 3, 4], [0, 1, 2, 3, 4]], ids=str)
def test_padding_rows_become_zero_and_read_nothing(padding: list[int], num_ranges: int) -> None:
    step = written(make_rows_step(Shape(4, 2, 16, 16, 16), [70, 20, 33, 64, 200], [1] * 5))
    wanted = expected(step, scale=0.3)[0]
    step.batch.seq_lens[padding] = 0
    step.batch.block_tables[padding] = 2**30
    out = decode(step, num_ranges)
    assert not out[padding].any()
    others = [seq for seq in range(5) if seq not in padding]
    torch.testing.assert_close(out[others].double(), wanted[others], atol=2e-5, rtol=1e-4)


def test_one_padding_row_alone_becomes_zero() -> None:
    step = written(make_rows_step(Shape(4, 2, 16, 16, 16), [70], [1]))
    step.batch.seq_lens[0] = 0
    assert not decode(step).any()


def test_a_workspace_is_used_again_with_other_lengths() -> None:
    workspace = DecodeWorkspace(3, 4, 16, 4, "cpu")
    for seq_lens in ([300, 5, 64], [2, 200, 129]):
        step = written(make_rows_step(Shape(4, 2, 16, 16, 16), seq_lens, [1, 1, 1]))
        wanted = expected(step, scale=0.3)[0]
        torch.testing.assert_close(decode(step, 4, workspace=workspace).double(), wanted, atol=2e-5, rtol=1e-4)


def test_rows_of_queries_may_be_strided() -> None:
    step = written(make_rows_step(Shape(4, 2, 16, 16, 16), [70, 20], [1, 1]))
    wanted = expected(step, scale=0.3)[0]
    wide = torch.full((2, 6, 16), float("nan"))
    wide[:, :4] = step.query
    strided = Step(wide[:, :4], step.key, step.value, step.cache, step.batch)
    torch.testing.assert_close(decode(strided).double(), wanted, atol=2e-5, rtol=1e-4)


def test_a_workspace_for_other_heads_is_refused() -> None:
    step = make_rows_step(Shape(4, 2, 16, 16, 16), [70, 20], [1, 1])
    with pytest.raises(ValueError, match="workspace"):
        decode(step, workspace=DecodeWorkspace(2, 8, 16, 4, "cpu"))
    with pytest.raises(ValueError, match="workspace"):
        decode(step, workspace=DecodeWorkspace(1, 4, 16, 4, "cpu"))


# Blocks by address


@pytest.mark.parametrize("num_ranges", [1, 3])
def test_blocks_outside_of_the_pool_are_read_where_they_lie(num_ranges: int) -> None:
    """Every second block lies in other memory, in front of the pool or behind it; its place in the pool has something else."""
    step, pool, elsewhere = written_in_pages([200, 33, 70])
    wanted = expected(step, scale=0.3)[0]
    addresses = torch.full(step.batch.block_tables.shape, 1 << 40)
    for row, seq_len in enumerate(step.batch.seq_lens.tolist()):
        for column in range(-(-seq_len // 16)):
            block = int(step.batch.block_tables[row, column])
            here, there = (pool, elsewhere) if (row + column) % 2 else (elsewhere, pool)
            addresses[row, column] = page_entries([here[block].data_ptr()], pool.data_ptr())[0]
            there[block] = float("nan")
    by_address = Step(step.query, step.key, step.value, step.cache, replace(step.batch, block_tables=addresses))

    torch.testing.assert_close(decode(by_address, num_ranges).double(), wanted, atol=2e-5, rtol=1e-4)


def test_shared_parts_cannot_be_read_by_address() -> None:
    step, _, _ = written_in_pages([33])
    tables = step.batch.block_tables.long()
    with pytest.raises(ValueError, match="shared parts are read by block ids"):
        paged_decode(
            step.query, step.cache, tables, step.batch.seq_lens, torch.empty_like(step.query),
            scale=0.3, window=None, softcap=None, sinks=None, workspace=DecodeWorkspace(1, 4, 16, 1, "cpu"),
            shared=cast(SharedParts, object()),
        )  # fmt: skip


def written_in_pages(seq_lens: list[int]) -> tuple[Step, Tensor, Tensor]:
    """A step whose blocks, of one page each, lie in a pool, and the same blocks in other memory."""
    step = written(make_rows_step(Shape(4, 2, 16, 16, 16), seq_lens, [1] * len(seq_lens)))
    num_blocks = step.cache.key.shape[0]
    page = PAGE_BYTES // 4
    pool, elsewhere = (aligned(num_blocks * page).view(num_blocks, page) for _ in range(2))
    key, value = (pool[:, start : start + 512].view(num_blocks, 2, 16, 16) for start in (0, 512))
    key.copy_(step.cache.key)
    value.copy_(step.cache.value)
    elsewhere.copy_(pool)
    return Step(step.query, step.key, step.value, LayerCache(key, value), step.batch), pool, elsewhere


def aligned(num_elements: int) -> Tensor:
    """Zeros that begin at a page."""
    memory = torch.zeros(num_elements + PAGE_BYTES // 4)
    start = -memory.data_ptr() % PAGE_BYTES // 4
    return memory[start : start + num_elements]
