"""The kernel that attends once to what several sequences share. Knows tiles, ranges and blocks; decode_shared.py its launch.

The queries of a group's sequences, all heads of one KV head, are packed into items of ROWS rows, so that one product serves
many sequences. An item's work is its group's shared tiles. The tiles of all items stand in one row, which is cut into
num_ranges equal ranges, as in decode_kernel.py:

```
tiles        | item 0: 16 sequences of group 0 | item 1: the rest of group 0   | item 2: group 1  |
ranges       | range 0       | range 1       | range 2       | range 3       | range 4         |
slots          0               1         2     3              4        5      6                    range + item
```
Every part of an item gets a slot of its own: along the row, range and item only grow, and one of them does at each part. The
kernel of the sequences' own keys adds the parts up; places says which are a sequence's.
"""

import triton
import triton.language as tl

from executor_svc.kernels.triton.e4m3 import as_operand, load_exponents, power_of_two, scaled_softmax_step
from executor_svc.kernels.triton.overlap import let_next_start
from executor_svc.kernels.triton.scores import LOG2E, LOWEST, block_ids, capped

PLACE = tl.constexpr(3)
"""Numbers of a place: first slot, number of slots, row within a slot's KV head."""


@triton.jit(
    do_not_specialize=["num_ranges", "tables_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "group_lens_ptr", "group_ends_ptr", "members_ptr"],
)
def shared_prefix_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    group_lens_ptr,
    group_ends_ptr,
    members_ptr,
    places_ptr,
    part_out_ptr,
    part_sums_ptr,
    num_ranges,
    scale,
    softcap,
    query_stride,
    key_stride,
    value_stride,
    tables_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    SEQS: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MAX_GROUPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    LETS_NEXT: tl.constexpr,
):
    """One range of the row of tiles, for one KV head: see above; arguments as in decode_shared.py."""
    let_next_start(LETS_NEXT)
    ROWS: tl.constexpr = SEQS * FEW_ROWS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    this_range = tl.program_id(0) // NUM_KV_HEADS

    groups = tl.arange(0, MAX_GROUPS)
    group_ends = tl.load(group_ends_ptr + groups)
    group_begins = tl.load(group_ends_ptr + groups - 1, mask=groups > 0, other=0)
    group_tiles = tl.load(group_lens_ptr + groups) // TILE
    group_items = tl.cdiv(group_ends - group_begins, SEQS)
    group_work = group_tiles * group_items
    work_ends = tl.cumsum(group_work, 0)
    all_tiles = tl.sum(group_work, 0)
    per_range = tl.cdiv(all_tiles, num_ranges)
    position = this_range * per_range
    end = tl.minimum(position + per_range, all_tiles)

    rows = tl.arange(0, ROWS)
    seq_in_item = rows // FEW_ROWS
    head_in_group = rows % FEW_ROWS
    dims_k = tl.arange(0, PADDED_K)
    dims_v = tl.arange(0, PADDED_V)
    in_tile = tl.arange(0, TILE)
    key_head_ptr = key_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM_K)
    value_head_ptr = value_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM_V)
    scale_in_base_2 = scale * LOG2E

    while position < end:
        group = tl.sum((work_ends <= position).to(tl.int32), 0)
        here, before = groups == group, groups < group
        tiles = tl.sum(tl.where(here, group_tiles, 0), 0)
        group_begin = tl.sum(tl.where(here, group_begins, 0), 0)
        group_end = tl.sum(tl.where(here, group_ends, 0), 0)
        work_begin = tl.sum(tl.where(before, group_work, 0), 0)
        item_in_group = (position - work_begin) // tiles
        item = tl.sum(tl.where(before, group_items, 0), 0) + item_in_group
        item_begin = work_begin + item_in_group * tiles
        first_tile = position - item_begin
        end_tile = tl.minimum(end - item_begin, tiles)
        first_member = group_begin + item_in_group * SEQS

        there = first_member + seq_in_item < group_end
        seqs = tl.load(members_ptr + first_member + seq_in_item, mask=there, other=0)
        row_mask = there & (head_in_group < GROUP)
        heads = kv_head * GROUP + head_in_group
        query_offsets = (seqs * query_stride + heads * HEAD_DIM_K)[:, None] + dims_k[None, :]
        query = tl.load(query_ptr + query_offsets, mask=row_mask[:, None] & (dims_k < HEAD_DIM_K)[None, :], other=0.0)

        if FP8:
            query, row_factors = as_operand(query)
            row_factors *= scale

        table_ptr = tables_ptr + tl.load(members_ptr + first_member) * tables_stride
        positions = first_tile * TILE + in_tile
        blocks = block_ids(table_ptr, positions // BLOCK_SIZE, positions < tiles * TILE)
        highest = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PADDED_V], tl.float32)
        # Every tile is full and visible to every row, so neither keys nor scores are masked.
        for _ in tl.range(first_tile, end_tile, num_stages=STAGES):
            in_block = positions % BLOCK_SIZE
            key_ptrs = key_head_ptr + (blocks * key_stride + in_block * HEAD_DIM_K)[:, None] + dims_k[None, :]
            if PADDED_K == HEAD_DIM_K:
                key = tl.load(key_ptrs)
            else:
                key = tl.load(key_ptrs, mask=(dims_k < HEAD_DIM_K)[None, :], other=0.0)
            if FP8:
                key = key.to(query.dtype)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            if FP8:
                inside = positions < tiles * TILE
                exponents = load_exponents(
                    key_ptr, blocks, key_stride, kv_head, in_block, inside, NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM_K, BLOCK_SIZE
                )
                scores = capped(scores * row_factors[:, None] * power_of_two(exponents)[None, :], softcap, SOFTCAP)
                exponents = load_exponents(
                    value_ptr, blocks, value_stride, kv_head, in_block, inside, NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM_V, BLOCK_SIZE
                )
                weights, factor, highest, total = scaled_softmax_step(scores, exponents, highest, total)
            else:
                if SOFTCAP:
                    scores = capped(scores * scale, softcap, True)
                    highest_now = tl.maximum(highest, tl.max(scores, 1))
                    weights = tl.exp2(scores - highest_now[:, None])
                else:
                    highest_now = tl.maximum(highest, tl.max(scores, 1) * scale_in_base_2)
                    weights = tl.exp2(scores * scale_in_base_2 - highest_now[:, None])
                factor = tl.exp2(highest - highest_now)
                total = total * factor + tl.sum(weights, 1)
                highest = highest_now
            value_ptrs = value_head_ptr + (blocks * value_stride + in_block * HEAD_DIM_V)[:, None] + dims_v[None, :]
            if PADDED_V == HEAD_DIM_V:
                value = tl.load(value_ptrs)
            else:
                value = tl.load(value_ptrs, mask=(dims_v < HEAD_DIM_V)[None, :], other=0.0)
            if FP8:
                value = value.to(query.dtype)
            acc = tl.dot(weights.to(value.dtype), value, acc * factor[:, None], input_precision=PRECISION)
            positions += TILE
            blocks = block_ids(table_ptr, positions // BLOCK_SIZE, positions < tiles * TILE)

        slot = this_range + item
        slot_rows = (slot * NUM_KV_HEADS + kv_head) * ROWS + rows
        out_mask = row_mask[:, None] & (dims_v < HEAD_DIM_V)[None, :]
        tl.store(part_out_ptr + slot_rows[:, None] * HEAD_DIM_V + dims_v[None, :], acc, mask=out_mask)
        tl.store(part_sums_ptr + slot_rows * 2, highest, mask=row_mask)
        tl.store(part_sums_ptr + slot_rows * 2 + 1, total, mask=row_mask)
        # The program in which the item begins says where its parts are.
        if first_tile == 0 and kv_head == 0:
            first_row = there & (head_in_group == 0)
            num_slots = (item_begin + tiles - 1) // per_range - this_range + 1
            tl.store(places_ptr + seqs * PLACE, slot + seqs * 0, mask=first_row)
            tl.store(places_ptr + seqs * PLACE + 1, num_slots + seqs * 0, mask=first_row)
            tl.store(places_ptr + seqs * PLACE + 2, rows, mask=first_row)
        position = item_begin + end_tile


@triton.jit
def add_shared_parts(
    highest,
    total,
    acc,
    first,
    count,
    row,
    kv_head,
    dims_v,
    part_out_ptr,
    part_sums_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    FEW_ROWS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Adds the parts of one sequence and KV head to what its own keys gave: highest, total [ROWS] and acc [ROWS, PADDED_V].

    first, count and row are the sequence's place; with a count of 0 all stays as it is. SHARED_ROWS are ROWS of
    shared_prefix_kernel; AT_ONCE parts are added up in one go. Rows from GROUP on come out as anything.
    """
    rows = tl.arange(0, FEW_ROWS)
    part_highest = tl.full([FEW_ROWS], LOWEST, tl.float32)
    part_total = tl.zeros([FEW_ROWS], tl.float32)
    part_acc = tl.zeros([FEW_ROWS, PADDED_V], tl.float32)
    for start in tl.range(0, count, AT_ONCE, num_stages=3):
        parts = start + tl.arange(0, AT_ONCE)
        slot_rows = (((first + parts) * NUM_KV_HEADS + kv_head) * SHARED_ROWS + row)[:, None] + rows[None, :]
        mask = (parts < count)[:, None] & (rows < GROUP)[None, :]
        highs = tl.load(part_sums_ptr + slot_rows * 2, mask=mask, other=LOWEST, cache_modifier=".cg")
        totals = tl.load(part_sums_ptr + slot_rows * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        out_mask = mask[:, :, None] & (dims_v < HEAD_DIM_V)[None, None, :]
        out_offsets = slot_rows[:, :, None] * HEAD_DIM_V + dims_v[None, None, :]
        outs = tl.load(part_out_ptr + out_offsets, mask=out_mask, other=0.0, cache_modifier=".cg")
        highest_now = tl.maximum(part_highest, tl.max(highs, 0))
        factor = tl.exp2(part_highest - highest_now)
        weights = tl.exp2(highs - highest_now[None, :])
        part_total = part_total * factor + tl.sum(totals * weights, 0)
        part_acc = part_acc * factor[:, None] + tl.sum(outs * weights[:, :, None], 0)
        part_highest = highest_now
    # To the rows of the product, which are padded: the same again and again.
    TIMES: tl.constexpr = ROWS // FEW_ROWS
    part_highest = tl.reshape(tl.broadcast_to(part_highest[None, :], [TIMES, FEW_ROWS]), [ROWS])
    part_total = tl.reshape(tl.broadcast_to(part_total[None, :], [TIMES, FEW_ROWS]), [ROWS])
    part_acc = tl.reshape(tl.broadcast_to(part_acc[None, :, :], [TIMES, FEW_ROWS, PADDED_V]), [ROWS, PADDED_V])
    highest_now = tl.maximum(highest, part_highest)
    factor = tl.exp2(highest - highest_now)
    part_factor = tl.exp2(part_highest - highest_now)
    total = total * factor + part_total * part_factor
    acc = acc * factor[:, None] + part_acc * part_factor[:, None]
    return highest_now, total, acc
