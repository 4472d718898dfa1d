"""New keys and values into their slots of a cache of e4m3, one head of a token at a time.

Knows the pool's layout. Does not know attention, nor where slots come from. kv_write.py does the same together with norm and
rotary embedding.
"""

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.triton.e4m3 import encoded, exponents_for
from executor_svc.kernels.triton.launch import Launch


def encode_kv(key: Tensor, value: Tensor, slot_mapping: Tensor, layer_cache: LayerCache) -> None:
    """Writes keys and values of tokens into their slots, as rows of e4m3; arguments as in write_kv."""
    num_tokens, num_kv_heads, head_dim_k = key.shape
    head_dim_v = value.shape[2]
    _encode_kv_kernel(
        (num_tokens, num_kv_heads),
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
        PADDED_K=triton.next_power_of_2(head_dim_k),
        PADDED_V=triton.next_power_of_2(head_dim_v),
        num_warps=1,
    )


@Launch
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _encode_kv_kernel(
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
    """As _write_kv_kernel, one head at a time, as rows of e4m3."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        row = head * BLOCK_SIZE + slot % BLOCK_SIZE
        key_block_ptr = key_cache_ptr.to(tl.pointer_type(tl.uint8)) + slot // BLOCK_SIZE * key_cache_stride
        value_block_ptr = value_cache_ptr.to(tl.pointer_type(tl.uint8)) + slot // BLOCK_SIZE * value_cache_stride
        _encode_row(key_ptr + token * key_stride, key_block_ptr, head, row, NUM_KV_HEADS * BLOCK_SIZE, HEAD_DIM_K, PADDED_K)
        _encode_row(value_ptr + token * value_stride, value_block_ptr, head, row, NUM_KV_HEADS * BLOCK_SIZE, HEAD_DIM_V, PADDED_V)


@triton.jit
def _encode_row(token_ptr, block_ptr, head, row, NUM_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr):
    """One head of a token into its row of a part."""
    dims = tl.arange(0, PADDED)
    values = tl.load(token_ptr + head * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    exponent = exponents_for(tl.max(tl.abs(values), 0))
    tl.store(block_ptr + row * HEAD_DIM + dims, encoded(values, exponent), mask=dims < HEAD_DIM)
    tl.store(block_ptr + NUM_ROWS * HEAD_DIM + row, exponent.to(tl.uint8))
