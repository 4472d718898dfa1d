"""Parts of attention over some keys each: a context gathered from its blocks, results of parts joined.

Knows the paged cache and log-sum-exps. Does not know who computes the parts (library.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.triton.e4m3 import is_e4m3, power_of_two
from executor_svc.kernels.triton.launch import Launch
from executor_svc.kernels.triton.scores import LOG2E

_TILE = 64


def gather(layer_cache: LayerCache, block_table: Tensor, start: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys [length, num_kv_heads, head_dim_k] and values of positions [start, start + length) of one sequence.

    Args:
        layer_cache: as in paged_decode.
        block_table: int32 [max_blocks] of the sequence.
        start: first position.
        length: how many.
        dtype: of the result; that of the cache, unless the cache holds rows of e4m3.
    """
    _, num_kv_heads, block_size, head_dim_v = layer_cache.value.shape
    head_dim_k = layer_cache.key.shape[3]
    keys = layer_cache.key.new_empty(length, num_kv_heads, head_dim_k, dtype=dtype)
    values = layer_cache.value.new_empty(length, num_kv_heads, head_dim_v, dtype=dtype)
    _gather_kernel(
        (triton.cdiv(length, _TILE), num_kv_heads),
        layer_cache.key,
        layer_cache.value,
        block_table,
        keys,
        values,
        start,
        length,
        layer_cache.key.stride(0),
        layer_cache.value.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM_K=head_dim_k,
        HEAD_DIM_V=head_dim_v,
        PADDED_K=triton.next_power_of_2(head_dim_k),
        PADDED_V=triton.next_power_of_2(head_dim_v),
        BLOCK_SIZE=block_size,
        TILE=_TILE,
        FP8=is_e4m3(layer_cache),
    )
    return keys, values


def join(total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds a part of the keys to what the others gave, in place.

    Args:
        total: [1, num_heads, num_queries, head_dim], any strides but the last dimension contiguous.
        total_lse: float32 [1, num_heads, num_queries, 1], natural logarithm of the sum of exponentials; any strides.
        part: as total, over other keys.
        part_lse: as total_lse.
    """
    _, num_heads, num_queries, head_dim = total.shape
    _join_kernel(
        (num_queries,),
        total,
        total_lse,
        part,
        part_lse,
        total.stride(1),
        total.stride(2),
        total_lse.stride(1),
        total_lse.stride(2),
        part.stride(1),
        part.stride(2),
        part_lse.stride(1),
        part_lse.stride(2),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS=triton.next_power_of_2(num_heads),
        PADDED=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


@Launch
@triton.jit(do_not_specialize=["start", "length"], do_not_specialize_on_alignment=["table_ptr"])
def _gather_kernel(
    key_cache_ptr,
    value_cache_ptr,
    table_ptr,
    keys_ptr,
    values_ptr,
    start,
    length,
    key_stride,
    value_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    FP8: tl.constexpr,
):
    kv_head = tl.program_id(1)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = rows < length
    positions = start + rows
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    in_block = kv_head * BLOCK_SIZE + positions % BLOCK_SIZE
    out_rows = rows.to(tl.int64) * NUM_KV_HEADS + kv_head
    dims = tl.arange(0, PADDED_K)
    mask = inside[:, None] & (dims < HEAD_DIM_K)[None, :]
    keys = tl.load(key_cache_ptr + (blocks * key_stride + in_block * HEAD_DIM_K)[:, None] + dims[None, :], mask=mask, other=0.0)
    if FP8:
        exponents_ptr = key_cache_ptr.to(tl.pointer_type(tl.uint8)) + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM_K
        exponents = tl.load(exponents_ptr + blocks * key_stride + in_block, mask=inside, other=127)
        keys = keys.to(tl.float32) * power_of_two(exponents)[:, None]
    tl.store(keys_ptr + (out_rows * HEAD_DIM_K)[:, None] + dims[None, :], keys, mask=mask)
    dims = tl.arange(0, PADDED_V)
    mask = inside[:, None] & (dims < HEAD_DIM_V)[None, :]
    value_rows = blocks * value_stride + in_block * HEAD_DIM_V
    values = tl.load(value_cache_ptr + value_rows[:, None] + dims[None, :], mask=mask, other=0.0)
    if FP8:
        exponents_ptr = value_cache_ptr.to(tl.pointer_type(tl.uint8)) + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM_V
        exponents = tl.load(exponents_ptr + blocks * value_stride + in_block, mask=inside, other=127)
        values = values.to(tl.float32) * power_of_two(exponents)[:, None]
    tl.store(values_ptr + (out_rows * HEAD_DIM_V)[:, None] + dims[None, :], values, mask=mask)


# Strides of log-sum-exps can change from call to call; those of the parts do not, and have to be known for wide loads.
@Launch
@triton.jit(
    do_not_specialize=["total_lse_head_stride", "total_lse_query_stride", "part_lse_head_stride", "part_lse_query_stride"]
)
def _join_kernel(
    total_ptr,
    total_lse_ptr,
    part_ptr,
    part_lse_ptr,
    total_head_stride,
    total_query_stride,
    total_lse_head_stride,
    total_lse_query_stride,
    part_head_stride,
    part_query_stride,
    part_lse_head_stride,
    part_lse_query_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, PADDED)
    head_mask = heads < NUM_HEADS
    mask = head_mask[:, None] & (dims < HEAD_DIM)[None, :]
    total_lse_ptrs = total_lse_ptr + query * total_lse_query_stride + heads * total_lse_head_stride
    part_lse_ptrs = part_lse_ptr + query * part_lse_query_stride + heads * part_lse_head_stride
    total_lse = tl.load(total_lse_ptrs, mask=head_mask, other=0.0) * LOG2E
    part_lse = tl.load(part_lse_ptrs, mask=head_mask, other=0.0) * LOG2E
    highest = tl.maximum(total_lse, part_lse)
    of_total = tl.exp2(total_lse - highest)
    of_part = tl.exp2(part_lse - highest)
    both = of_total + of_part
    total_ptrs = total_ptr + query * total_query_stride + (heads * total_head_stride)[:, None] + dims[None, :]
    part_ptrs = part_ptr + query * part_query_stride + (heads * part_head_stride)[:, None] + dims[None, :]
    total = tl.load(total_ptrs, mask=mask, other=0.0).to(tl.float32)
    part = tl.load(part_ptrs, mask=mask, other=0.0).to(tl.float32)
    joined = total * (of_total / both)[:, None] + part * (of_part / both)[:, None]
    tl.store(total_ptrs, joined.to(total_ptr.dtype.element_ty), mask=mask)
    tl.store(total_lse_ptrs, (highest + tl.log2(both)) / LOG2E, mask=head_mask)
