"""Random batches over a poisoned cache, for every backend."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.kernels.batch import AttentionBatch, LayerCache, Rotary


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    block_size: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Step:
    query: Tensor
    key: Tensor
    value: Tensor
    cache: LayerCache
    batch: AttentionBatch

    def cache_copy(self) -> LayerCache:
        return LayerCache(self.cache.key.clone(), self.cache.value.clone())


def make_step(shape: Shape, seq_lens: Sequence[int], query_lens: Sequence[int]) -> Step:
    """A step over sequences of these lengths; slots that no sequence owns are NaN, table entries past the end are wild."""
    bs, dtype = shape.block_size, shape.dtype
    num_blocks = [-(-length // bs) for length in seq_lens]
    pool = sum(num_blocks) + 3
    # As in the pool: one storage, a block's keys and values side by side.
    floats = shape.num_kv_heads * bs * (shape.head_dim_k + shape.head_dim_v)
    storage = torch.full((pool, floats), float("nan"), dtype=dtype)
    split = shape.num_kv_heads * bs * shape.head_dim_k
    cache = LayerCache(
        storage[:, :split].view(pool, shape.num_kv_heads, shape.head_dim_k, bs),
        storage[:, split:].view(pool, shape.num_kv_heads, bs, shape.head_dim_v),
    )
    tables = torch.full((len(seq_lens), max(num_blocks) + 1), 2**30, dtype=torch.int32)
    free = torch.randperm(pool).int()
    slots = []
    for seq, (length, queries) in enumerate(zip(seq_lens, query_lens, strict=True)):
        tables[seq, : num_blocks[seq]] = free[sum(num_blocks[:seq]) :][: num_blocks[seq]]
        positions = torch.arange(length)
        blocks, offsets = tables[seq, positions // bs].long(), positions % bs
        cached = length - queries
        cache.key[blocks[:cached], :, :, offsets[:cached]] = torch.randn(cached, shape.num_kv_heads, shape.head_dim_k).to(dtype)
        cache.value[blocks[:cached], :, offsets[:cached]] = torch.randn(cached, shape.num_kv_heads, shape.head_dim_v).to(dtype)
        slots.append((blocks * bs + offsets)[cached:])
    bounds = [0]
    for queries in query_lens:
        bounds.append(bounds[-1] + queries)
    batch = AttentionBatch(
        slot_mapping=torch.cat(slots),
        block_tables=tables,
        cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_decodes=next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens)),
        max_seqlen_q=max(query_lens),
        max_seqlen_k=max(seq_lens),
        block_size=bs,
    )
    return Step(
        query=torch.randn(bounds[-1], shape.num_heads, shape.head_dim_k).to(dtype),
        key=torch.randn(bounds[-1], shape.num_kv_heads, shape.head_dim_k).to(dtype),
        value=torch.randn(bounds[-1], shape.num_kv_heads, shape.head_dim_v).to(dtype),
        cache=cache,
        batch=batch,
    )


def make_rotary(num_tokens: int, rotary_dim: int, dtype: torch.dtype = torch.float32) -> Rotary:
    angles = torch.randn(num_tokens, rotary_dim // 2).repeat(1, 2)
    return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))
