"""Batches of tests.unit...batches in the layout of the CUDA pool: a key is one row, K and V of a block side by side."""

from collections.abc import Sequence

import torch
from torch import Tensor

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.reference import reference_paged_attention
from tests.unit.executor_svc.kernels.batches import Shape, Step, make_step


def rows_cache(cache: LayerCache) -> LayerCache:
    """A copy of a cache of tests.unit...batches with key [num_blocks, num_kv_heads, block_size, head_dim_k]."""
    key = cache.key.transpose(2, 3)
    num_blocks, key_size, value_size = key.shape[0], key[0].numel(), cache.value[0].numel()
    storage = torch.cat([key.reshape(num_blocks, -1), cache.value.reshape(num_blocks, -1)], dim=1)
    return LayerCache(storage[:, :key_size].view(key.shape), storage[:, key_size : key_size + value_size].view(cache.value.shape))


def columns_cache(cache: LayerCache) -> LayerCache:
    """A view of a cache of rows_cache as the reference wants it."""
    return LayerCache(cache.key.transpose(2, 3), cache.value)


def make_rows_step(shape: Shape, seq_lens: Sequence[int], query_lens: Sequence[int]) -> Step:
    """As make_step, in the layout of the CUDA pool."""
    step = make_step(shape, seq_lens, query_lens)
    return Step(step.query, step.key, step.value, rows_cache(step.cache), step.batch)


def expected(
    step: Step, *, scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, LayerCache]:
    """The reference's output and cache, which step keeps as it was."""
    cache = rows_cache(columns_cache(step.cache))
    out = reference_paged_attention(
        step.query,
        step.key,
        step.value,
        columns_cache(cache),
        step.batch,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    return out, cache
