"""What decode and prefill share inside their kernels: attention scores in base 2, and the steps of an online softmax.

Scores are kept multiplied by log2(e), because exp2 is what the hardware has. LOWEST stands in for minus infinity where a
difference of two of them must not be NaN.
"""

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.batch import LayerCache

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)


def padded(size: int) -> int:
    """The next power of two, at least 16, which matrix instructions want of a side."""
    return max(16, int(triton.next_power_of_2(size)))


def check_heads(query: Tensor, layer_cache: LayerCache) -> None:
    """Raises ValueError when a kernel would read heads as something they are not."""
    num_heads, num_kv_heads = query.shape[1], layer_cache.key.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads")
    if query.shape[2] != layer_cache.key.shape[3]:
        raise ValueError(f"queries of {query.shape[2]} dimensions, keys of {layer_cache.key.shape[3]}")
    for name, tensor in (("query", query), ("key cache", layer_cache.key), ("value cache", layer_cache.value)):
        if tensor.stride()[-1] != 1 or tensor.stride()[-2] != tensor.shape[-1]:
            raise ValueError(f"the last two dimensions of the {name} are not contiguous")


def dot_precision(query: Tensor) -> str:
    """How tl.dot multiplies float32: as float32; TF32 would lose 13 bits of what the dtype promises."""
    return "ieee" if query.element_size() == 4 else "tf32"


@triton.jit
def capped(scores, softcap, SOFTCAP: tl.constexpr):
    """Scores in natural units as scores in base 2, capped first if SOFTCAP."""
    if SOFTCAP:
        # tanh by one exponential; right at both ends, where it overflows to infinity or vanishes.
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E / softcap)) + 1.0))
    return scores * LOG2E


@triton.jit
def softmax_step(scores, highest_before, total):
    """One step of an online softmax over the rows of scores.

    Args:
        scores: [rows, keys] in base 2; -inf where a key is not visible.
        highest_before: [rows] largest score so far, LOWEST before the first.
        total: [rows] sum of weights so far, relative to it.

    Returns:
        weights [rows, keys], factor [rows] for everything accumulated before, the new largest score and total.
    """
    highest = tl.maximum(highest_before, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None])
    factor = tl.exp2(highest_before - highest)
    return weights, factor, highest, total * factor + tl.sum(weights, 1)


@triton.jit
def block_ids(table_ptr, entries, mask):
    """Entries of a block table as int64; 0 where mask is false. The table has int32, or int64 of 48 bits and a sign.

    Read as halves of 16 bits on purpose. A loop's loads of 32 bits and more are staged through shared memory by the compiler,
    the loads of keys, whose addresses come from here, then wait for that stage, and half of the pipeline is lost. Loads of 16
    bits stay plain loads.
    """
    low_ptr = (table_ptr + entries).to(tl.pointer_type(tl.uint16))
    low = tl.load(low_ptr, mask=mask, other=0).to(tl.int64)
    entry = low + tl.load(low_ptr + 1, mask=mask, other=0).to(tl.int64) * 65536
    if table_ptr.dtype.element_ty == tl.int64:
        high_ptr = (low_ptr + 2).to(tl.pointer_type(tl.int16))
        entry += tl.load(high_ptr, mask=mask, other=0).to(tl.int64) * 4294967296
    return entry
