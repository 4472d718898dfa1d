"""Paged attention of chunks of queries, one kernel for all of them and for every form of attention.

Knows the paged cache and the packed batch. Does not know that libraries have faster kernels for some forms (prefill.py does).

A program takes ROWS rows of one KV head: QUERIES positions with the GROUP query heads of each, so that a key that was
fetched serves them all. It walks over the keys that any of its rows may see; only the last few steps need the causal mask.
Programs of the longest walks come first.
"""

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.triton.configs import Config, lookup, register_defaults
from executor_svc.kernels.triton.e4m3 import as_operand, is_e4m3, load_exponents, power_of_two, scaled_softmax_step
from executor_svc.kernels.triton.launch import Launch
from executor_svc.kernels.triton.scores import LOWEST, block_ids, capped, check_heads, dot_precision, padded, softmax_step

FEW, MANY = "paged_prefill_few", "paged_prefill_many"
MANY_TOKENS = 4096

# rows: queries * heads of a program; tile: keys per step; stages: tiles in flight, this one included.
_AMPERE = {"rows": 64, "tile": 64, "num_warps": 4, "stages": 2}
_LESS_SHARED_MEMORY = {"rows": 64, "tile": 32, "num_warps": 4, "stages": 2}
_BLACKWELL = {"rows": 128, "tile": 64, "num_warps": 8, "stages": 2}
_COMMON = {80: _AMPERE, 86: _LESS_SHARED_MEMORY, 100: _BLACKWELL, 120: _LESS_SHARED_MEMORY}
register_defaults(FEW, {**_COMMON, 90: {"rows": 128, "tile": 64, "num_warps": 8, "stages": 3}})
register_defaults(MANY, {**_COMMON, 90: {"rows": 128, "tile": 128, "num_warps": 8, "stages": 3}})


def prefill_config(query: Tensor, layer_cache: LayerCache) -> Config:
    """The configuration that triton_prefill uses."""
    return lookup(
        MANY if query.shape[0] >= MANY_TOKENS else FEW,
        {
            "head_dim_k": query.shape[2],
            "head_dim_v": layer_cache.value.shape[3],
            "group": query.shape[1] // layer_cache.key.shape[1],
            "dtype": str(query.dtype).removeprefix("torch."),
        },
    )


def triton_prefill(
    query: Tensor,
    layer_cache: LayerCache,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    config: Config | None = None,
) -> None:
    """Causal attention of packed chunks over everything cached of their sequences, the chunks' own KV included.

    Args:
        query: [num_tokens, num_heads, head_dim_k]; rows may be strided, the last two dimensions are contiguous.
        layer_cache: as in paged_decode; holds the KV of the chunks already.
        block_tables: int32 [num_seqs, max_blocks]; entries beyond a length are never read.
        cu_seqlens_q: int32 [num_seqs + 1]; cu_seqlens_q[i] - cu_seqlens_q[0] is the row of query in which chunk i starts.
        seq_lens: int32 [num_seqs]; KV length with the chunk.
        out: [num_tokens, num_heads, head_dim_v]; rows may be strided.
        scale: as in paged_decode.
        window: same.
        softcap: same.
        sinks: same.
        config: None: the tuned one.

    Raises:
        ValueError: shapes that do not fit together.
    """
    check_heads(query, layer_cache)
    num_tokens, num_heads, head_dim_k = query.shape
    _, num_kv_heads, block_size, head_dim_v = layer_cache.value.shape
    num_seqs = seq_lens.shape[0]
    if num_tokens == 0:
        return
    config = config or prefill_config(query, layer_cache)
    group = num_heads // num_kv_heads
    rows, tile = config["rows"], config["tile"]
    # Larger elements and heads take more registers and shared memory than the configuration counts on.
    size = query.element_size() * max(padded(head_dim_k), padded(head_dim_v))
    while size > 256 and (rows > 32 or tile > 32):
        rows, tile, size = max(rows // 2, 32), max(tile // 2, 32), size // 2
    rows = max(rows, padded(group))
    queries = rows // group
    # Each chunk's last program may be partly empty.
    num_programs = num_tokens // queries + num_seqs
    _paged_prefill_kernel(
        (num_programs * num_kv_heads,),
        query,
        layer_cache.key,
        layer_cache.value,
        block_tables,
        cu_seqlens_q,
        seq_lens,
        out,
        sinks if sinks is not None else query,
        num_seqs,
        num_programs,
        scale,
        softcap if softcap is not None else 1.0,
        window if window is not None else 0,
        query.stride(0),
        layer_cache.key.stride(0),
        layer_cache.value.stride(0),
        block_tables.stride(0),
        out.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=rows,
        QUERIES=queries,
        HEAD_DIM_K=head_dim_k,
        PADDED_K=padded(head_dim_k),
        HEAD_DIM_V=head_dim_v,
        PADDED_V=padded(head_dim_v),
        BLOCK_SIZE=block_size,
        TILE=tile,
        MAX_SEQS=next(most for most in (16, 128, 1024, 4096, 1 << 16) if num_seqs <= most),
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        STAGES=config["stages"],
        PRECISION=dot_precision(query),
        FP8=is_e4m3(layer_cache),
        num_warps=config["num_warps"],
    )


@Launch
@triton.jit(
    do_not_specialize=["num_seqs", "num_programs", "window", "tables_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "cu_seqlens_ptr", "seq_lens_ptr", "sinks_ptr"],
)
def _paged_prefill_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    out_ptr,
    sinks_ptr,
    num_seqs,
    num_programs,
    scale,
    softcap,
    window,
    query_stride,
    key_stride,
    value_stride,
    tables_stride,
    out_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MAX_SEQS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
):
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    program = num_programs - 1 - tl.program_id(0) // NUM_KV_HEADS

    # Which chunk this program belongs to: chunks in a row, each of cdiv(its queries, QUERIES) programs.
    seqs = tl.arange(0, MAX_SEQS)
    starts = tl.load(cu_seqlens_ptr + seqs, mask=seqs < num_seqs, other=0)
    stops = tl.load(cu_seqlens_ptr + seqs + 1, mask=seqs < num_seqs, other=0)
    programs = tl.cdiv(stops - starts, QUERIES)
    ends = tl.cumsum(programs, 0)
    seq = tl.sum(((ends <= program) & (seqs < num_seqs)).to(tl.int32), 0)
    if seq < num_seqs:
        first_token = tl.load(cu_seqlens_ptr)
        start = tl.load(cu_seqlens_ptr + seq)
        num_queries = tl.load(cu_seqlens_ptr + seq + 1) - start
        seq_len = tl.load(seq_lens_ptr + seq)
        context = seq_len - num_queries
        first_query = (program - tl.sum(tl.where(seqs < seq, programs, 0), 0)) * QUERIES

        rows = tl.arange(0, ROWS)
        queries = first_query + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        row_mask = (rows < QUERIES * GROUP) & (queries < num_queries)
        positions = context + queries
        tokens = (start - first_token + queries).to(tl.int64)
        dims_k = tl.arange(0, PADDED_K)
        dims_v = tl.arange(0, PADDED_V)
        query_offsets = tokens * query_stride + heads * HEAD_DIM_K
        query_mask = row_mask[:, None] & (dims_k < HEAD_DIM_K)[None, :]
        query = tl.load(query_ptr + query_offsets[:, None] + dims_k[None, :], mask=query_mask, other=0.0)
        row_factors = tl.full([ROWS], 1.0, tl.float32)
        if FP8:
            query, row_factors = as_operand(query)

        # Keys before first_key nobody sees, before all_see everybody, from end on nobody.
        first_position = context + first_query
        end = tl.minimum(first_position + QUERIES, seq_len)
        first_key = first_position * 0
        all_see = (first_position + 1) // TILE * TILE
        if WINDOW:
            first_key = tl.maximum(first_position - window + 1, 0) // BLOCK_SIZE * BLOCK_SIZE
            all_see = first_key

        highest = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PADDED_V], tl.float32)
        table_ptr = tables_ptr + seq * tables_stride
        if not WINDOW:
            highest, total, acc = _walk(
                query, row_factors, highest, total, acc, positions, 0, all_see, end, table_ptr, key_ptr, value_ptr, kv_head,
                key_stride, value_stride, scale, softcap, window, NUM_KV_HEADS, HEAD_DIM_K, PADDED_K, HEAD_DIM_V, PADDED_V,
                BLOCK_SIZE, TILE, False, WINDOW, SOFTCAP, STAGES, PRECISION, FP8,
            )  # fmt: skip
        highest, total, acc = _walk(
            query, row_factors, highest, total, acc, positions, all_see, end, end, table_ptr, key_ptr, value_ptr, kv_head,
            key_stride, value_stride, scale, softcap, window, NUM_KV_HEADS, HEAD_DIM_K, PADDED_K, HEAD_DIM_V, PADDED_V,
            BLOCK_SIZE, TILE, True, WINDOW, SOFTCAP, STAGES, PRECISION, FP8,
        )  # fmt: skip

        if SINKS:
            sink = capped(tl.load(sinks_ptr + heads, mask=row_mask, other=0.0).to(tl.float32), 1.0, False)
            highest_now = tl.maximum(highest, sink)
            factor = tl.exp2(highest - highest_now)
            total = total * factor + tl.exp2(sink - highest_now)
            acc = acc * factor[:, None]
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_offsets = tokens * out_stride + heads * HEAD_DIM_V
        out_mask = row_mask[:, None] & (dims_v < HEAD_DIM_V)[None, :]
        tl.store(out_ptr + out_offsets[:, None] + dims_v[None, :], acc.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def _walk(
    query,
    row_factors,
    highest,
    total,
    acc,
    positions,
    first_key,
    last_key,
    end,
    table_ptr,
    key_ptr,
    value_ptr,
    kv_head,
    key_stride,
    value_stride,
    scale,
    softcap,
    window,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
):
    """Attends to keys [first_key, last_key), which all rows see in full unless MASKED. Keys from end on are not read."""
    dims_k = tl.arange(0, PADDED_K)
    dims_v = tl.arange(0, PADDED_V)
    key_head_ptr = key_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM_K)
    value_head_ptr = value_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM_V)
    keys = first_key + tl.arange(0, TILE)
    blocks = block_ids(table_ptr, keys // BLOCK_SIZE, keys < end)
    for _ in tl.range(first_key, last_key, TILE, num_stages=STAGES):
        in_block = keys % BLOCK_SIZE
        inside = keys < end if MASKED else keys >= 0
        key_mask = inside[:, None]
        value_mask = inside[:, None]
        if PADDED_K != HEAD_DIM_K:
            key_mask = key_mask & (dims_k < HEAD_DIM_K)[None, :]
        if PADDED_V != HEAD_DIM_V:
            value_mask = value_mask & (dims_v < HEAD_DIM_V)[None, :]
        key_ptrs = key_head_ptr + (blocks * key_stride + in_block * HEAD_DIM_K)[:, None] + dims_k[None, :]
        value_ptrs = value_head_ptr + (blocks * value_stride + in_block * HEAD_DIM_V)[:, None] + dims_v[None, :]
        key = tl.load(key_ptrs, mask=key_mask, other=0.0)
        if FP8:
            key_exponents = load_exponents(
                key_ptr, blocks, key_stride, kv_head, in_block, inside, NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM_K, BLOCK_SIZE
            )
            value_exponents = load_exponents(
                value_ptr, blocks, value_stride, kv_head, in_block, inside, NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM_V, BLOCK_SIZE
            )
            scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision=PRECISION)
            scores = capped(scores * (row_factors * scale)[:, None] * power_of_two(key_exponents)[None, :], softcap, SOFTCAP)
        else:
            scores = capped(tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale, softcap, SOFTCAP)
        if MASKED:
            visible = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
            if WINDOW:
                visible = visible & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        if FP8:
            weights, factor, highest, total = scaled_softmax_step(scores, value_exponents, highest, total)
        else:
            weights, factor, highest, total = softmax_step(scores, highest, total)
        value = tl.load(value_ptrs, mask=value_mask, other=0.0)
        if FP8:
            value = value.to(query.dtype)
        acc = tl.dot(weights.to(value.dtype), value, acc * factor[:, None], input_precision=PRECISION)
        keys += TILE
        blocks = block_ids(table_ptr, keys // BLOCK_SIZE, keys < end)
    return highest, total, acc
