"""The CUDA backend in Triton's interpreter against the float64 reference: mixed batches, every form of attention."""

import pytest
import torch
from torch import Tensor

from executor_svc.kernels.batch import AttentionBatch, LayerCache
from executor_svc.kernels.reference import reference_paged_attention
from executor_svc.kernels.triton.backend import TritonBackend
from tests.unit.executor_svc.kernels.batches import Shape, Step, make_rotary
from tests.unit.executor_svc.kernels.triton.steps import columns_cache, expected, make_rows_step, rows_cache

SHAPES = {
    "llama": Shape(8, 2, 64, 64, 16),
    "three_heads_each": Shape(9, 3, 32, 32, 16),
    "one_group": Shape(16, 1, 80, 80, 16),
    "no_groups": Shape(3, 3, 96, 96, 16),
    "values_of_another_size": Shape(4, 2, 24, 40, 16),
    "blocks_of_five": Shape(4, 2, 16, 16, 5),
    "large_heads": Shape(2, 1, 256, 256, 16),
}


def check(step: Step, *, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> None:
    wanted, wanted_cache = expected(step, scale=0.3, window=window, softcap=softcap, sinks=sinks)
    backend = TritonBackend()
    out = backend.paged_attention(
        step.query, step.key, step.value, step.cache, step.batch, scale=0.3, window=window, softcap=softcap, sinks=sinks
    )
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=1e-4)
    for part, wanted_part in ((step.cache.key, wanted_cache.key), (step.cache.value, wanted_cache.value)):
        torch.testing.assert_close(part, wanted_part, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_mixed_batches(shape: Shape) -> None:
    check(make_rows_step(shape, [70, 1, 150, 33, 17], [1, 1, 40, 33, 2]))


@pytest.mark.parametrize("window", [1, 20, 1000])
def test_windows(window: int) -> None:
    check(make_rows_step(Shape(4, 2, 16, 16, 16), [70, 300, 90], [1, 70, 90]), window=window)


def test_softcap_and_sinks() -> None:
    check(make_rows_step(Shape(4, 2, 16, 16, 16), [70, 200, 90], [1, 70, 90]), softcap=1.5, sinks=torch.randn(4))


def test_chunks_alone() -> None:
    check(make_rows_step(Shape(2, 1, 16, 16, 16), [300], [300]))
    check(make_rows_step(Shape(2, 1, 16, 16, 16), [300, 2], [129, 2]))


def test_padding_rows_of_a_captured_step_change_nothing() -> None:
    """As a graph runs it: rows of decodes and chunks that are not there, tokens that belong to nobody, unknown host lengths."""
    step = make_rows_step(Shape(4, 2, 16, 16, 16), [70, 150, 33], [1, 40, 33])
    wanted, wanted_cache = expected(step, scale=0.3)
    batch, padding = step.batch, torch.tensor([0], dtype=torch.int32)
    # Rows: a decode, a padding decode, two chunks, two chunks of no token. Tokens: 2 + 73 + 5.
    order = torch.tensor([0, 0, *range(1, 74), *[0] * 5])
    slots = batch.slot_mapping[order]
    slots[1], slots[75:] = -1, -1
    wild = torch.full_like(batch.block_tables[:1], 2**30)
    tables = torch.cat([batch.block_tables[:1], wild, batch.block_tables[1:], wild, wild])
    padded = AttentionBatch(
        slot_mapping=slots,
        block_tables=tables,
        cu_seqlens_q=torch.tensor([0, 1, 2, 42, 75, 75, 75], dtype=torch.int32),
        seq_lens=torch.cat([batch.seq_lens[:1], padding, batch.seq_lens[1:], padding, padding]),
        num_decodes=2,
        max_seqlen_q=80,
        max_seqlen_k=4096,
        block_size=16,
    )
    out = TritonBackend().paged_attention(
        step.query[order],
        step.key[order],
        step.value[order],
        step.cache,
        padded,
        scale=0.3,
        window=None,
        softcap=None,
        sinks=None,
    )
    torch.testing.assert_close(out[[0, *range(2, 75)]].double(), wanted, atol=2e-5, rtol=1e-4)
    assert not out[1].any()
    torch.testing.assert_close(step.cache.key, wanted_cache.key, equal_nan=True, atol=0, rtol=0)


def test_rotary_embedding_is_applied_to_queries_and_keys() -> None:
    step = make_rows_step(Shape(4, 2, 16, 16, 16), [20, 40], [1, 12])
    rotary = make_rotary(step.query.shape[0], 16)
    cache = columns_cache(rows_cache(columns_cache(step.cache)))
    wanted = reference_paged_attention(step.query, step.key, step.value, cache, step.batch, scale=0.3, rotary=rotary)
    out = TritonBackend().paged_attention(
        step.query, step.key, step.value, step.cache, step.batch, scale=0.3, window=None, softcap=None, sinks=None, rotary=rotary
    )
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=1e-4)


def test_workspaces_are_shared_by_layers_alike() -> None:
    backend = TritonBackend()
    cache = LayerCache(torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8))
    assert backend.workspace(4, cache) is backend.workspace(4, cache)
    assert backend.workspace(8, cache) is not backend.workspace(4, cache)
    assert backend.workspace_bytes == backend.workspace(4, cache).num_bytes + backend.workspace(8, cache).num_bytes
