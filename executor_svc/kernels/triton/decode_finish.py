"""The end of decode attention: parts of a sequence added up, rows written. Knows parts; decode_kernel.py makes them."""

import triton
import triton.language as tl

from executor_svc.kernels.triton.scores import LOWEST, capped


@triton.jit
def finish(
    first_range,
    last_range,
    kv_head,
    dims_v,
    partial_out_ptr,
    partial_sums_ptr,
    out_row_ptr,
    sinks_ptr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Adds up the parts of one sequence and KV head, several ranges at a time, and writes the result."""
    rows = tl.arange(0, FEW_ROWS)
    row_mask = rows < GROUP
    highest = tl.full([FEW_ROWS], LOWEST, tl.float32)
    total = tl.zeros([FEW_ROWS], tl.float32)
    acc = tl.zeros([FEW_ROWS, PADDED_V], tl.float32)
    # Staged, so that the next parts are on their way while these are added up: few programs get here, each waits alone.
    for start in tl.range(first_range, last_range + 1, AT_ONCE, num_stages=3):
        ranges = start + tl.arange(0, AT_ONCE)
        slots = ranges * 2 + (ranges == first_range).to(tl.int32)
        slot_heads = slots[:, None] * NUM_HEADS + (kv_head * GROUP + rows)[None, :]
        mask = (ranges <= last_range)[:, None] & row_mask[None, :]
        # Past the first-level cache, which may hold what these addresses had before.
        highs = tl.load(partial_sums_ptr + slot_heads * 2, mask=mask, other=LOWEST, cache_modifier=".cg")
        totals = tl.load(partial_sums_ptr + slot_heads * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        part_mask = mask[:, :, None] & (dims_v < HEAD_DIM_V)[None, None, :]
        part_offsets = slot_heads[:, :, None] * HEAD_DIM_V + dims_v[None, None, :]
        parts = tl.load(partial_out_ptr + part_offsets, mask=part_mask, other=0.0, cache_modifier=".cg")
        highest_now = tl.maximum(highest, tl.max(highs, 0))
        factor = tl.exp2(highest - highest_now)
        weights = tl.exp2(highs - highest_now[None, :])
        total = total * factor + tl.sum(totals * weights, 0)
        acc = acc * factor[:, None] + tl.sum(parts * weights[:, :, None], 0)
        highest = highest_now
    write_rows(acc, highest, total, rows, kv_head, dims_v, out_row_ptr, sinks_ptr, GROUP, HEAD_DIM_V, SINKS)


@triton.jit
def write_rows(
    acc,
    highest,
    total,
    rows,
    kv_head,
    dims_v,
    out_row_ptr,
    sinks_ptr,
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Divides by the sum of weights, the sink's included, and stores the rows of one KV head."""
    heads = kv_head * GROUP + rows
    if SINKS:
        sink = capped(tl.load(sinks_ptr + heads, mask=rows < GROUP, other=0.0).to(tl.float32), 1.0, False)
        highest_now = tl.maximum(highest, sink)
        factor = tl.exp2(highest - highest_now)
        total = total * factor + tl.exp2(sink - highest_now)
        acc = acc * factor[:, None]
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    mask = (rows < GROUP)[:, None] & (dims_v < HEAD_DIM_V)[None, :]
    tl.store(out_row_ptr + heads[:, None] * HEAD_DIM_V + dims_v[None, :], acc.to(out_row_ptr.dtype.element_ty), mask=mask)
