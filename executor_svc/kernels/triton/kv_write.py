"""New keys and values into their slots of the paged cache: alone, or with q/k norm and rotary embedding in the same launch.

Knows the pool's layout. Does not know attention, nor where slots come from. A negative slot is a token that is not kept.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.batch import LayerCache, Rotary
from executor_svc.kernels.triton.configs import Config, lookup, register_defaults
from executor_svc.kernels.triton.e4m3 import encoded, exponents_for, is_e4m3
from executor_svc.kernels.triton.kv_encode import encode_kv
from executor_svc.kernels.triton.launch import Constants, Launch
from executor_svc.kernels.triton.overlap import let_next_start, overlap_on, wait_for_previous

KERNEL = "rope_write_kv"

# many_rows: from so many heads * tokens on, a program takes heads_per_program of a token instead of one; num_warps: for that.
register_defaults(KERNEL, {80: {"many_rows": 1024, "heads_per_program": 16, "num_warps": 4}})


def write_kv(key: Tensor, value: Tensor, slot_mapping: Tensor, layer_cache: LayerCache) -> None:
    """Writes keys and values of tokens into their slots.

    Args:
        key: [num_tokens, num_kv_heads, head_dim_k]; rows may be strided, the last two dimensions are contiguous.
        value: [num_tokens, num_kv_heads, head_dim_v]; same.
        slot_mapping: int64 [num_tokens]; block_id * block_size + offset; < 0: this token is not written.
        layer_cache: key [num_blocks, num_kv_heads, block_size, head_dim_k], value alike, of the same dtype or rows of e4m3.
    """
    num_tokens, num_kv_heads, head_dim_k = key.shape
    if num_tokens == 0:
        return
    head_dim_v = value.shape[2]
    if is_e4m3(layer_cache):
        encode_kv(key, value, slot_mapping, layer_cache)
        return
    _write_kv_kernel(
        (num_tokens,),
        key,
        value,
        slot_mapping,
        layer_cache.key,
        layer_cache.value,
        key.stride(0),
        value.stride(0),
        layer_cache.key.stride(0),
        layer_cache.value.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM_K=head_dim_k,
        HEAD_DIM_V=head_dim_v,
        BLOCK_SIZE=layer_cache.value.shape[2],
        PADDED_K=triton.next_power_of_2(num_kv_heads * head_dim_k),
        PADDED_V=triton.next_power_of_2(num_kv_heads * head_dim_v),
        num_warps=4,
    )


def rope_write_kv(
    qkv: Tensor,
    positions: Tensor | None,
    slot_mapping: Tensor,
    layer_cache: LayerCache,
    query_out: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary: Rotary,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    key_out: Tensor | None = None,
    config: Config | None = None,
    overlap: bool | None = None,
) -> None:
    """Norm of query and key heads (optional), rotary embedding, KV into its slots, queries to query_out; one launch.

    All in float32, rounded once at the end. The embedding turns dimension i with i + rotary_dim / 2 (the "neox" halves).

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; rows may be strided.
        positions: int [num_tokens], rows of rotary's tables; None: row i belongs to token i.
        slot_mapping: int64 [num_tokens]; < 0: keys and values of this token are not written.
        layer_cache: as in write_kv, head_dim for keys and values.
        query_out: [num_tokens, num_heads, head_dim], contiguous; with num_heads + num_kv_heads heads, rotated keys follow, with
            num_heads + 2 * num_kv_heads, values too.
        num_heads: query heads.
        num_kv_heads: key heads, and value heads.
        head_dim: of all of them.
        rotary: cos and sin [rows, rotary_dim], contiguous, any float dtype; rotary_dim <= head_dim.
        q_norm_weight: [head_dim] of an RMS norm over each query head; None: no norm.
        k_norm_weight: the same of key heads; both or none.
        norm_eps: of both.
        norm_weight_offset: added to both weights (1 in the Gemma families).
        key_out: [num_tokens, num_kv_heads, head_dim], contiguous: rotated keys, for chunks that attend to their own; None: none.
        config: None: the tuned one.
        overlap: begin before the kernel in front has ended, see overlap.py; None: where the device can.

    Raises:
        ValueError: shapes that do not fit together.
    """
    num_tokens = qkv.shape[0]
    rotary_dim = rotary.cos.shape[1]
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv of {tuple(qkv.shape)} is not {num_heads} + 2 * {num_kv_heads} heads of {head_dim}, or not contiguous"
        )
    if rotary_dim > head_dim or rotary_dim % 2:
        raise ValueError(f"a rotary dimension of {rotary_dim} in heads of {head_dim}")
    out_heads = query_out.shape[1]
    known = (num_heads, num_heads + num_kv_heads, num_heads + 2 * num_kv_heads)
    if out_heads not in known or query_out.shape[2] != head_dim or not query_out.is_contiguous():
        raise ValueError(f"query_out of {tuple(query_out.shape)} is not contiguous, or for other heads")
    if key_out is not None and (key_out.shape != (num_tokens, num_kv_heads, head_dim) or not key_out.is_contiguous()):
        raise ValueError(f"key_out of {tuple(key_out.shape)} is not contiguous, or for other heads")
    if (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("norm weights of queries and keys come together")
    if num_tokens == 0:
        return
    all_heads = num_heads + 2 * num_kv_heads
    config = config or lookup(KERNEL, {"heads": all_heads, "head_dim": head_dim})
    heads = config["heads_per_program"] if num_tokens * all_heads >= config["many_rows"] else 1
    heads = min(heads, triton.next_power_of_2(all_heads))
    _rope_write_kv_kernel.launch(
        (num_tokens, -(-all_heads // heads)),
        _rope_constants(
            num_heads,
            num_kv_heads,
            out_heads,
            head_dim,
            rotary_dim,
            layer_cache.value.shape[2],
            heads,
            config["num_warps"] if heads > 1 else 1,
            key_out is not None,
            positions is not None,
            q_norm_weight is not None,
            overlap_on(qkv.device, overlap),
            is_e4m3(layer_cache),
        ),
        qkv,
        positions if positions is not None else slot_mapping,
        slot_mapping,
        rotary.cos,
        rotary.sin,
        q_norm_weight if q_norm_weight is not None else qkv,
        k_norm_weight if k_norm_weight is not None else qkv,
        query_out,
        key_out if key_out is not None else query_out,
        layer_cache.key,
        layer_cache.value,
        norm_eps,
        norm_weight_offset,
        qkv.stride(0),
        layer_cache.key.stride(0),
        layer_cache.value.stride(0),
    )


@functools.cache
def _rope_constants(
    num_heads: int,
    num_kv_heads: int,
    out_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    heads: int,
    num_warps: int,
    has_key_out: bool,
    has_positions: bool,
    has_norm: bool,
    overlap: bool,
    fp8: bool,
) -> Constants:
    half, rest = rotary_dim // 2, head_dim - rotary_dim
    return Constants(
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        OUT_HEADS=out_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        REST=rest,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        PADDED_HALF=triton.next_power_of_2(max(half, 1)),
        PADDED_REST=triton.next_power_of_2(max(rest, 1)),
        KEY_OUT=has_key_out,
        POSITIONS=has_positions,
        NORM=has_norm,
        OVERLAP=overlap,
        FP8=fp8,
        num_warps=num_warps,
        **({"launch_pdl": True} if overlap else {}),
    )


@Launch
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _write_kv_kernel(
    key_ptr,
    value_ptr,
    slots_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_stride,
    value_stride,
    key_cache_stride,
    value_cache_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    dims = tl.arange(0, PADDED_K)
    mask = dims < tl.where(slot >= 0, NUM_KV_HEADS * HEAD_DIM_K, 0)
    target = block * key_cache_stride + ((dims // HEAD_DIM_K) * BLOCK_SIZE + offset) * HEAD_DIM_K + dims % HEAD_DIM_K
    tl.store(key_cache_ptr + target, tl.load(key_ptr + token * key_stride + dims, mask=mask), mask=mask)
    dims = tl.arange(0, PADDED_V)
    mask = dims < tl.where(slot >= 0, NUM_KV_HEADS * HEAD_DIM_V, 0)
    target = block * value_cache_stride + ((dims // HEAD_DIM_V) * BLOCK_SIZE + offset) * HEAD_DIM_V + dims % HEAD_DIM_V
    tl.store(value_cache_ptr + target, tl.load(value_ptr + token * value_stride + dims, mask=mask), mask=mask)


@Launch
@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_write_kv_kernel(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    query_out_ptr,
    key_out_ptr,
    key_cache_ptr,
    value_cache_ptr,
    norm_eps,
    norm_weight_offset,
    qkv_stride,
    key_cache_stride,
    value_cache_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    OUT_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
    KEY_OUT: tl.constexpr,
    POSITIONS: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
    FP8: tl.constexpr,
):
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query = heads < NUM_HEADS
    is_kept = heads < OUT_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    in_rows = heads < NUM_HEADS + 2 * NUM_KV_HEADS

    # A head is three parts: two halves that turn each other, and a rest.
    low = tl.arange(0, PADDED_HALF)
    rest = 2 * HALF + tl.arange(0, PADDED_REST)
    half_mask = in_rows[:, None] & (low < HALF)[None, :]
    rest_mask = in_rows[:, None] & (rest < HEAD_DIM)[None, :]
    head_ptr = qkv_ptr + token * qkv_stride + (heads * HEAD_DIM)[:, None]
    first = tl.load(head_ptr + low[None, :], mask=half_mask, other=0.0).to(tl.float32)
    second = tl.load(head_ptr + HALF + low[None, :], mask=half_mask, other=0.0).to(tl.float32)
    others = tl.zeros([HEADS, PADDED_REST], tl.float32)
    if REST > 0:
        others = tl.load(head_ptr + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)

    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(others * others, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + norm_eps)
        factor = tl.where(is_value, 1.0, factor)[:, None]
        first *= factor * _norm_weight(q_norm_ptr, k_norm_ptr, is_query, is_value, low, low < HALF, norm_weight_offset)
        second *= factor * _norm_weight(q_norm_ptr, k_norm_ptr, is_query, is_value, HALF + low, low < HALF, norm_weight_offset)
        if REST > 0:
            others *= factor * _norm_weight(q_norm_ptr, k_norm_ptr, is_query, is_value, rest, rest < HEAD_DIM, norm_weight_offset)

    row = token
    if POSITIONS:
        row = tl.load(positions_ptr + token).to(tl.int64)
    table = row * (2 * HALF) + low
    cos_first = tl.load(cos_ptr + table, mask=low < HALF, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_ptr + table, mask=low < HALF, other=0.0).to(tl.float32)
    cos_second = tl.load(cos_ptr + table + HALF, mask=low < HALF, other=0.0).to(tl.float32)
    sin_second = tl.load(sin_ptr + table + HALF, mask=low < HALF, other=0.0).to(tl.float32)
    turned_first = tl.where(is_value[:, None], first, first * cos_first[None, :] - second * sin_first[None, :])
    turned_second = tl.where(is_value[:, None], second, second * cos_second[None, :] + first * sin_second[None, :])

    query_head_ptr = query_out_ptr + token * (OUT_HEADS * HEAD_DIM) + (heads * HEAD_DIM)[:, None]
    query_mask = is_kept[:, None]
    tl.store(query_head_ptr + low[None, :], turned_first, mask=half_mask & query_mask)
    tl.store(query_head_ptr + HALF + low[None, :], turned_second, mask=half_mask & query_mask)
    if REST > 0:
        tl.store(query_head_ptr + rest[None, :], others, mask=rest_mask & query_mask)

    if KEY_OUT:
        key_rows = token * (NUM_KV_HEADS * HEAD_DIM) + (heads - NUM_HEADS) * HEAD_DIM
        key_out_head_ptr = key_out_ptr + key_rows[:, None]
        is_key = (~is_query & ~is_value)[:, None]
        tl.store(key_out_head_ptr + low[None, :], turned_first, mask=half_mask & is_key)
        tl.store(key_out_head_ptr + HALF + low[None, :], turned_second, mask=half_mask & is_key)
        if REST > 0:
            tl.store(key_out_head_ptr + rest[None, :], others, mask=rest_mask & is_key)

    slot = tl.load(slots_ptr + token)
    kv_heads = tl.where(is_value, heads - NUM_HEADS - NUM_KV_HEADS, heads - NUM_HEADS)
    in_part = (kv_heads * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
    block = slot // BLOCK_SIZE
    end_of_kept = tl.where(slot >= 0, NUM_HEADS + 2 * NUM_KV_HEADS, 0)
    key_mask = (~is_query & ~is_value & (heads < end_of_kept))[:, None]
    value_mask = (is_value & (heads < end_of_kept))[:, None]
    if FP8:
        key_cache_ptr = key_cache_ptr.to(tl.pointer_type(tl.uint8))
        value_cache_ptr = value_cache_ptr.to(tl.pointer_type(tl.uint8))
        largest = tl.maximum(tl.max(tl.abs(turned_first), 1), tl.max(tl.abs(turned_second), 1))
        if REST > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(others), 1))
        exponents = exponents_for(largest)[:, None]
        turned_first = encoded(turned_first, exponents)
        turned_second = encoded(turned_second, exponents)
        if REST > 0:
            others = encoded(others, exponents)
        of_head = (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM + kv_heads * BLOCK_SIZE + slot % BLOCK_SIZE)[:, None]
        tl.store(key_cache_ptr + block * key_cache_stride + of_head, exponents.to(tl.uint8), mask=key_mask)
        tl.store(value_cache_ptr + block * value_cache_stride + of_head, exponents.to(tl.uint8), mask=value_mask)
    key_head_ptr = key_cache_ptr + (block * key_cache_stride + in_part)[:, None]
    tl.store(key_head_ptr + low[None, :], turned_first, mask=half_mask & key_mask)
    tl.store(key_head_ptr + HALF + low[None, :], turned_second, mask=half_mask & key_mask)
    value_head_ptr = value_cache_ptr + (block * value_cache_stride + in_part)[:, None]
    tl.store(value_head_ptr + low[None, :], turned_first, mask=half_mask & value_mask)
    tl.store(value_head_ptr + HALF + low[None, :], turned_second, mask=half_mask & value_mask)
    if REST > 0:
        tl.store(key_head_ptr + rest[None, :], others, mask=rest_mask & key_mask)
        tl.store(value_head_ptr + rest[None, :], others, mask=rest_mask & value_mask)


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, is_query, is_value, dims, mask, offset):
    """Weights [heads, dims] of the norm of query and key heads; 1 for value heads."""
    of_query = tl.load(q_norm_ptr + dims, mask=mask, other=0.0).to(tl.float32) + offset
    of_key = tl.load(k_norm_ptr + dims, mask=mask, other=0.0).to(tl.float32) + offset
    return tl.where(is_value[:, None], 1.0, tl.where(is_query[:, None], of_query[None, :], of_key[None, :]))
