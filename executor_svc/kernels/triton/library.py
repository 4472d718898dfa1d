"""Attention of a long chunk by the library's kernel (cuDNN), which wants keys and values one behind the other.

Knows contiguous tensors and the paged cache. Does not know which chunks are worth it (prefill.py does).

```
keys of the sequence     | context: gathered from its blocks, a piece at a time | the chunk's own, fresh |
queries of the chunk     | sees all of a piece: rectangle                       | causal: square         |
                           every part comes with its log-sum-exp, by which parts are joined
```
The library builds a plan of 50 ms and more for every new shape, unless it may round lengths up inside of the plan, which
is a switch of its own in the environment; it is read once, at the first use. Then torch makes offsets and lengths on the
device for every call, fifteen tiny kernels, which take the host 200 us and the GPU 30. It does so only for tensors whose rows
are dense, so the caller has the choice by layout:

    dense rows           any length, one plan for all lengths up to the next power of two
    rows with a stride   a plan for each shape, and nothing but the attention itself: for lengths on a grid
"""

import functools
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.triton.launch import Launch
from executor_svc.kernels.triton.scores import LOG2E

PIECE = 32_768
"""Keys of a context that are gathered at once: bounds the scratch memory."""
GRID = 512
"""Chunks whose number of rows is a multiple of this, and not too large, are attended to as they lie; each length has a plan."""
_SHORTEST_PLANNED, _LONGEST_PLANNED = 1024, 8192
_TILE = 64
log = logging.getLogger(__name__)


def allow_library() -> None:
    """Has the library build plans for rounded lengths; before its attention is used for the first time."""
    # The switch has no other place than the environment of this very process.
    os.environ["TORCH_CUDNN_SDPA_AVOID_RECOMPILE"] = "1"


class Library(Protocol):
    """Attention over contiguous keys and values, for chunks that are long enough."""

    def can(
        self, query: Tensor, layer_cache: LayerCache, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> bool:
        """Whether it computes this form of attention on this device."""
        ...

    def is_worth(self, query_len: int, kv_len: int) -> bool:
        """Whether it is faster than this package's kernel for a chunk of query_len tokens at the end of kv_len."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention of [1, num_heads, num_queries, head_dim] over keys and values [1, num_kv_heads, num_keys, head_dim].

        Returns:
            [1, num_heads, num_queries, head_dim], rows contiguous; and with_lse float32 [1, num_heads, num_queries, 1]: the
            natural logarithm of each row's sum of exponentials, any strides.
        """
        ...


class Cudnn:
    """cuDNN's attention, as torch ships it. Measured on an H200: as fast as ours from 2,000 tokens on, 1.6 times at 16,000."""

    def can(
        self, query: Tensor, layer_cache: LayerCache, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> bool:
        """See Library."""
        head_dim_k, head_dim_v = query.shape[2], layer_cache.value.shape[3]
        return (
            query.is_cuda
            and query.element_size() == 2
            and window is None
            and softcap is None
            and sinks is None
            and head_dim_k == head_dim_v
            and head_dim_k % 8 == 0
            and head_dim_k <= 128
            and _works(query.device, query.dtype, query.shape[1], layer_cache.value.shape[1], head_dim_k)
        )

    def is_worth(self, query_len: int, kv_len: int) -> bool:
        """See Library."""
        return query_len >= 1024 and query_len * (kv_len - query_len // 2) >= 3_000_000

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """See Library."""
        if not _is_dense(query):
            heads = query.shape[1], key.shape[1], query.shape[3]
            _plan(query.device, query.dtype, *heads, query.stride(2), key.stride(2), causal)
        return self._attend(query, key, value, scale, causal, with_lse)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, with_lse, 0.0, causal, False, scale=scale
        )[:2]
        return out, lse


@functools.cache
def _works(device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether cuDNN's attention is there and takes calls for these heads."""
    query, keys = (
        _as_heads(torch.zeros(2048, heads, head_dim, dtype=dtype, device=device)) for heads in (num_heads, num_kv_heads)
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells once of each layout that it is an experiment
            Cudnn().attend(query, keys, keys, 1.0, causal=True, with_lse=True)
            Cudnn().attend(query, keys, keys, 1.0, causal=False, with_lse=True)
            strided = torch.zeros(GRID, num_heads + num_kv_heads, head_dim, dtype=dtype, device=device)
            query, keys = (_as_heads(part) for part in strided.split_with_sizes((num_heads, num_kv_heads), 1))
            Cudnn().attend(query, keys, keys, 1.0, causal=False, with_lse=True)
    except RuntimeError as error:
        log.warning("long prompts are slower than they could be, cuDNN attention does not run: %s", error)
        return False
    return True


@functools.cache
def _plan(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    stride: int,
    key_stride: int,
    causal: bool,
) -> None:
    """Has cuDNN plan, 60 ms each, all that is attended to as it lies, in the thread that calls: not within a request."""
    sizes = range(_SHORTEST_PLANNED, _LONGEST_PLANNED + 1, GRID)
    shapes = [(size, piece) for size in sizes for piece in ([size] if causal else planned_pieces(size))]
    query, keys = (
        torch.zeros(length, row // head_dim, head_dim, dtype=dtype, device=device)[:, :heads]
        for length, heads, row in (
            (_LONGEST_PLANNED, num_heads, stride),
            (max(piece for _, piece in shapes), num_kv_heads, key_stride),
        )
    )
    for size, piece in shapes:
        part = _as_heads(keys[:piece])
        Cudnn()._attend(_as_heads(query[:size]), part, part, 1.0, causal, True)


def is_planned(num_rows: int) -> bool:
    """Whether chunks of so many rows are attended to as they lie."""
    return num_rows % GRID == 0 and _SHORTEST_PLANNED <= num_rows <= _LONGEST_PLANNED


def planned_pieces(num_rows: int) -> tuple[int, ...]:
    """Numbers of keys in front of a chunk of so many rows that it is attended to as it lies with, the largest first.

    The middle of a long prompt goes in chunks of the largest size; what is planned for other sizes is for its end.
    """
    if not is_planned(num_rows) or num_rows < _LONGEST_PLANNED // 2:
        return ()
    return (32_768, 24_576, 16_384, 8192) if num_rows == _LONGEST_PLANNED else (24_576, 8192)


def library_chunk(
    library: Library,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_cache: LayerCache,
    block_table: Tensor,
    context: int,
    *,
    scale: float,
) -> Tensor:
    """Causal attention of one chunk over its context in the cache and its own keys.

    Args:
        library: computes the parts.
        query: [num_queries, num_heads, head_dim]; rows may be strided.
        key: [num_queries, num_kv_heads, head_dim] of the chunk itself, rotated; rows may be strided. The three are copied unless
            they are parts of the same rows and is_planned(num_queries). Then their last rows may be padding: finite, and not seen
            by the rows before.
        value: same.
        layer_cache: as in paged_decode.
        block_table: int32 [max_blocks] of the sequence.
        context: keys before the chunk.
        scale: scores are multiplied by it.

    Returns:
        [num_queries, num_heads, head_dim], contiguous.
    """
    asked, num_queries = query.shape[0], -(-query.shape[0] // GRID) * GRID
    if is_planned(num_queries) and query.shape[2] == value.shape[2]:
        arrange = _as_heads
        if asked < num_queries or not _are_packed(query, key, value):
            query, key, value = _packed(query, key, value, num_queries)
    else:
        arrange, num_queries = _as_dense_heads, asked
    queries = arrange(query)
    # With sums or without them are two plans, and the sums cost nothing.
    total, total_lse = library.attend(queries, arrange(key), arrange(value), scale, causal=True, with_lse=True)
    for start, length in pieces(num_queries, context):
        if length not in planned_pieces(num_queries):
            queries = _as_dense_heads(queries[0].transpose(0, 1))
        keys, values = gather(layer_cache, block_table, start, length)
        part, part_lse = library.attend(queries, _as_heads(keys), _as_heads(values), scale, causal=False, with_lse=True)
        join(total, total_lse, part, part_lse)
    return total[0].transpose(0, 1)[:asked]


def _are_packed(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether queries, keys and values of a token may be parts of one row."""
    return query.stride(0) == key.stride(0) == value.stride(0) > query.shape[1] * query.shape[2]


def _packed(query: Tensor, key: Tensor, value: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copies with queries, keys and values of a token in one row, and rows of zeros up to num_rows."""
    num_tokens, sizes = query.shape[0], (query.shape[1], key.shape[1], value.shape[1])
    heads = query.new_empty(num_rows, sum(sizes), query.shape[2])
    torch.cat([query, key, value], 1, out=heads[:num_tokens])
    heads[num_tokens:].zero_()
    query, key, value = heads.split_with_sizes(sizes, 1)
    return query, key, value


def pieces(num_queries: int, context: int) -> Iterator[tuple[int, int]]:
    """A context cut up: start and length of each piece, planned ones first."""
    start = 0
    for length in planned_pieces(num_queries):
        while context - start >= length:
            yield start, length
            start += length
    for rest in range(start, context, PIECE):
        yield rest, min(PIECE, context - rest)


def gather(layer_cache: LayerCache, block_table: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys [length, num_kv_heads, head_dim_k] and values of positions [start, start + length) of one sequence."""
    _, num_kv_heads, block_size, head_dim_v = layer_cache.value.shape
    head_dim_k = layer_cache.key.shape[3]
    keys = layer_cache.key.new_empty(length, num_kv_heads, head_dim_k)
    values = layer_cache.value.new_empty(length, num_kv_heads, head_dim_v)
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


def _as_heads(rows: Tensor) -> Tensor:
    """[num_tokens, num_heads, head_dim] as [1, num_heads, num_tokens, head_dim]."""
    return rows.transpose(0, 1).unsqueeze(0)


def _as_dense_heads(rows: Tensor) -> Tensor:
    """As _as_heads, over contiguous rows: a copy where they are not."""
    return _as_heads(rows.contiguous())


def _is_dense(heads: Tensor) -> bool:
    """Whether heads [1, num_heads, num_tokens, head_dim] lie as _as_dense_heads makes them."""
    return heads.transpose(1, 2).is_contiguous()


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
    tl.store(keys_ptr + (out_rows * HEAD_DIM_K)[:, None] + dims[None, :], keys, mask=mask)
    dims = tl.arange(0, PADDED_V)
    mask = inside[:, None] & (dims < HEAD_DIM_V)[None, :]
    value_rows = blocks * value_stride + in_block * HEAD_DIM_V
    values = tl.load(value_cache_ptr + value_rows[:, None] + dims[None, :], mask=mask, other=0.0)
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
