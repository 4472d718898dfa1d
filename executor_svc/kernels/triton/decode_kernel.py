"""The kernel of decode attention. Knows tiles, ranges and blocks; decode.py knows its launch.

The keys of all sequences, cut into tiles, stand in one row; the row is cut into num_ranges equal ranges, whatever the
lengths. A program takes one range for one KV head with all its query heads, so one long sequence fills the card as well
as many short ones, and the programs of a range, one per head, read the same blocks at the same time.

```
tiles        | seq 0 ............................... | seq 1 .... | seq 2 ...................... |
ranges       | range 0       | range 1       | range 2       | range 3       | range 4        |
partials       slot 1          slot 0          slot 0, slot 1   slot 0 ...                             seq 1 lies in one range:
                                                                                                       written directly
```
A sequence that spans ranges is finished by the program that arrives last, by the counter of (sequence, KV head), which it
sets back to zero. Padding rows have no tiles, so that they cost no range its time. With SHARED a sequence's tiles are those of
its own keys, from own_starts on; the program in which it begins adds what decode_shared_kernel.py made of the keys before.
"""

import triton
import triton.language as tl

from executor_svc.kernels.triton.decode_finish import finish, write_rows
from executor_svc.kernels.triton.decode_shared_kernel import PLACE, add_shared_parts
from executor_svc.kernels.triton.e4m3 import (
    as_operand,
    halves_of,
    load_exponents,
    load_pairs,
    power_of_two,
    scaled_softmax_step,
)
from executor_svc.kernels.triton.overlap import let_next_start, wait_for_previous
from executor_svc.kernels.triton.scores import LOWEST, block_ids, capped, softmax_step


# Slices of a batch begin anywhere; a kernel per alignment would be compiled in the middle of serving.
@triton.jit(
    do_not_specialize=["num_seqs", "num_ranges", "window", "tables_stride"],
    do_not_specialize_on_alignment=["tables_ptr", "seq_lens_ptr", "sinks_ptr", "own_starts_ptr"],
)
def paged_decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    tables_ptr,
    seq_lens_ptr,
    out_ptr,
    sinks_ptr,
    partial_out_ptr,
    partial_sums_ptr,
    arrived_ptr,
    own_starts_ptr,
    places_ptr,
    shared_out_ptr,
    shared_sums_ptr,
    num_seqs,
    num_ranges,
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
    FEW_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
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
    SHARED: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
    LETS_NEXT: tl.constexpr,
):
    """One range of the row of tiles, for one KV head: see above; arguments as in decode.py."""
    let_next_start(LETS_NEXT)
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    this_range = tl.program_id(0) // NUM_KV_HEADS

    # Where this range begins and ends in the row of all tiles, and which sequences that is.
    if MAX_SEQS == 1:
        seq_len = tl.load(seq_lens_ptr)
        first_key = _first_key(seq_len, window, own_starts_ptr, num_seqs > 0, BLOCK_SIZE, WINDOW, SHARED)
        all_tiles = _num_tiles(seq_len, first_key, TILE)
        per_range = tl.cdiv(all_tiles, num_ranges)
        begin = this_range * per_range
        end = tl.minimum(begin + per_range, all_tiles)
        first_seq = begin * 0
        last_seq = begin * 0
        seq_begin = begin * 0
    else:
        seqs = tl.arange(0, MAX_SEQS)
        seq_lens = tl.load(seq_lens_ptr + seqs, mask=seqs < num_seqs, other=0)
        first_keys = _first_key(seq_lens, window, own_starts_ptr + seqs, seqs < num_seqs, BLOCK_SIZE, WINDOW, SHARED)
        tiles = tl.where(seqs < num_seqs, _num_tiles(seq_lens, first_keys, TILE), 0)
        ends = tl.cumsum(tiles, 0)
        all_tiles = tl.sum(tiles, 0)
        per_range = tl.cdiv(all_tiles, num_ranges)
        begin = this_range * per_range
        end = tl.minimum(begin + per_range, all_tiles)
        first_seq = tl.sum((ends <= begin).to(tl.int32), 0)
        last_seq = tl.sum((ends < end).to(tl.int32), 0)
        seq_begin = tl.sum(tl.where(seqs < first_seq, tiles, 0), 0)
        seq_len = tl.load(seq_lens_ptr + first_seq, mask=first_seq < num_seqs, other=0)
        first_key = _first_key(seq_len, window, own_starts_ptr + first_seq, first_seq < num_seqs, BLOCK_SIZE, WINDOW, SHARED)
    last_seq = tl.where(begin < end, last_seq, -1)  # nothing left for this range

    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows
    dims_k = tl.arange(0, PADDED_K)
    dims_v = tl.arange(0, PADDED_V)
    in_tile = tl.arange(0, TILE)
    key_head_ptr = key_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM_K)
    value_head_ptr = value_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM_V)

    # Of each sequence, the first block ids are read while something else goes on: here, the end of the kernel in front.
    positions = first_key + (begin - seq_begin) * TILE + in_tile
    blocks = block_ids(tables_ptr + first_seq * tables_stride, positions // BLOCK_SIZE, positions < seq_len)
    if not SHARED:
        wait_for_previous(OVERLAP)
        _write_padding(
            this_range,
            num_ranges,
            num_seqs,
            seq_lens_ptr,
            out_ptr,
            kv_head,
            dims_v,
            out_stride,
            GROUP,
            ROWS,
            HEAD_DIM_V,
            PADDED_V,
        )

    for seq in tl.range(first_seq, last_seq + 1, num_stages=1):
        seq_tiles = _num_tiles(seq_len, first_key, TILE)
        first_tile = tl.maximum(begin - seq_begin, 0)
        end_tile = tl.minimum(end - seq_begin, seq_tiles)
        table_ptr = tables_ptr + seq * tables_stride

        query_mask = (rows < GROUP)[:, None] & (dims_k < HEAD_DIM_K)[None, :]
        query_offsets = seq * query_stride + heads[:, None] * HEAD_DIM_K + dims_k[None, :]
        query = tl.load(query_ptr + query_offsets, mask=query_mask, other=0.0)
        if FP8:
            query, row_factors = as_operand(query)
            row_factors *= scale

        if SHARED and not OVERLAP:
            first_slot, num_slots, shared_row = _place(places_ptr + seq * PLACE, (first_tile == 0) & (first_key > 0))
        highest = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PADDED_V], tl.float32)
        if FP8:
            acc_first = tl.zeros([ROWS, PADDED_V // 2], tl.float32)
            acc_second = tl.zeros([ROWS, PADDED_V // 2], tl.float32)
        # Block ids are read one step ahead, so that keys and values do not wait for them.
        for _ in tl.range(first_tile, end_tile, num_stages=STAGES):
            inside = positions < seq_len
            in_block = positions % BLOCK_SIZE
            key_mask = inside[:, None]
            if PADDED_K != HEAD_DIM_K:
                key_mask = key_mask & (dims_k < HEAD_DIM_K)[None, :]
            key_rows = blocks * key_stride + in_block * HEAD_DIM_K
            key = tl.load(key_head_ptr + key_rows[:, None] + dims_k[None, :], mask=key_mask, other=0.0)
            if FP8:
                exponents = load_exponents(
                    key_ptr, blocks, key_stride, kv_head, in_block, inside, NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM_K, BLOCK_SIZE
                )
                scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision=PRECISION)
                scores = capped(scores * row_factors[:, None] * power_of_two(exponents)[None, :], softcap, SOFTCAP)
            else:
                scores = capped(tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale, softcap, SOFTCAP)
            visible = inside
            if WINDOW:
                visible = visible & (positions >= seq_len - window)
            scores = tl.where(visible[None, :], scores, float("-inf"))
            if FP8:
                exponents = load_exponents(
                    value_ptr, blocks, value_stride, kv_head, in_block, inside, NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM_V, BLOCK_SIZE
                )
                weights, factor, highest, total = scaled_softmax_step(scores, exponents, highest, total)
            else:
                weights, factor, highest, total = softmax_step(scores, highest, total)
            if FP8:
                value_rows = blocks * value_stride + in_block * HEAD_DIM_V
                pairs = load_pairs(value_head_ptr, value_rows, inside, HEAD_DIM_V, PADDED_V)
                weights = weights.to(query.dtype)
                first, second = halves_of(pairs, query.dtype)
                acc_first = acc_first * factor[:, None] + tl.dot(weights, first, input_precision=PRECISION)
                acc_second = acc_second * factor[:, None] + tl.dot(weights, second, input_precision=PRECISION)
            else:
                value_mask = inside[:, None]
                if PADDED_V != HEAD_DIM_V:
                    value_mask = value_mask & (dims_v < HEAD_DIM_V)[None, :]
                value_rows = blocks * value_stride + in_block * HEAD_DIM_V
                value = tl.load(value_head_ptr + value_rows[:, None] + dims_v[None, :], mask=value_mask, other=0.0)
                acc = acc * factor[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
            positions += TILE
            blocks = block_ids(table_ptr, positions // BLOCK_SIZE, positions < seq_len)

        if FP8:
            acc = tl.interleave(acc_first, acc_second)
        if SHARED:
            if OVERLAP:
                # The kernel in front computes the shared parts, and is not needed before.
                wait_for_previous(OVERLAP)
                first_slot, num_slots, shared_row = _place(places_ptr + seq * PLACE, (first_tile == 0) & (first_key > 0))
            if num_slots > 0:
                highest, total, acc = add_shared_parts(
                    highest,
                    total,
                    acc,
                    first_slot,
                    num_slots,
                    shared_row,
                    kv_head,
                    dims_v,
                    shared_out_ptr,
                    shared_sums_ptr,
                    NUM_KV_HEADS,
                    GROUP,
                    ROWS,
                    FEW_ROWS,
                    HEAD_DIM_V,
                    PADDED_V,
                    SHARED_ROWS,
                    AT_ONCE,
                )

        next_len = tl.load(seq_lens_ptr + seq + 1, mask=seq < last_seq, other=0)
        next_key = _first_key(next_len, window, own_starts_ptr + seq + 1, seq < last_seq, BLOCK_SIZE, WINDOW, SHARED)
        positions = next_key + in_tile
        blocks = block_ids(table_ptr + tables_stride, positions // BLOCK_SIZE, positions < next_len)

        out_row_ptr = out_ptr + seq * out_stride
        if end_tile - first_tile == seq_tiles:
            write_rows(acc, highest, total, rows, kv_head, dims_v, out_row_ptr, sinks_ptr, GROUP, HEAD_DIM_V, SINKS)
        else:
            # The range in which the sequence begins keeps its part in slot 1, all others in slot 0.
            slot = this_range * 2 + tl.where(first_tile == 0, 1, 0)
            out_mask = (rows < GROUP)[:, None] & (dims_v < HEAD_DIM_V)[None, :]
            slot_heads = slot * NUM_HEADS + heads
            tl.store(partial_out_ptr + slot_heads[:, None] * HEAD_DIM_V + dims_v[None, :], acc, mask=out_mask)
            tl.store(partial_sums_ptr + slot_heads * 2, highest, mask=rows < GROUP)
            tl.store(partial_sums_ptr + slot_heads * 2 + 1, total, mask=rows < GROUP)
            # All threads have stored before one of them says so.
            tl.debug_barrier()
            first_range = seq_begin // per_range
            last_range = (seq_begin + seq_tiles - 1) // per_range
            counter_ptr = arrived_ptr + seq * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == last_range - first_range:
                tl.store(counter_ptr, 0)
                finish(
                    first_range,
                    last_range,
                    kv_head,
                    dims_v,
                    partial_out_ptr,
                    partial_sums_ptr,
                    out_row_ptr,
                    sinks_ptr,
                    NUM_HEADS,
                    GROUP,
                    FEW_ROWS,
                    AT_ONCE,
                    HEAD_DIM_V,
                    PADDED_V,
                    SINKS,
                )
        seq_begin += seq_tiles
        seq_len = next_len
        first_key = next_key

    if SHARED:
        wait_for_previous(OVERLAP)
        _write_padding(
            this_range,
            num_ranges,
            num_seqs,
            seq_lens_ptr,
            out_ptr,
            kv_head,
            dims_v,
            out_stride,
            GROUP,
            ROWS,
            HEAD_DIM_V,
            PADDED_V,
        )


@triton.jit
def _write_padding(
    this_range,
    num_ranges,
    num_seqs,
    seq_lens_ptr,
    out_ptr,
    kv_head,
    dims_v,
    out_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_V: tl.constexpr,
):
    """Zeros for this range's share of the padding rows: in the row of tiles they would all lie in the last ranges."""
    rows = tl.arange(0, ROWS)
    mask = (rows < GROUP)[:, None] & (dims_v < HEAD_DIM_V)[None, :]
    offsets = (kv_head * GROUP + rows)[:, None] * HEAD_DIM_V + dims_v[None, :]
    zeros = tl.zeros([ROWS, PADDED_V], out_ptr.dtype.element_ty)
    for seq in tl.range(this_range, num_seqs, num_ranges, num_stages=1):
        if tl.load(seq_lens_ptr + seq) == 0:
            tl.store(out_ptr + seq * out_stride + offsets, zeros, mask=mask)


@triton.jit
def _first_key(seq_lens, window, own_starts_ptr, mask, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr):
    """Position of the first key that is read: the start of the block of the first visible one, or of what is not shared."""
    first = seq_lens * 0
    if WINDOW:
        first = tl.maximum(seq_lens - window, 0) // BLOCK_SIZE * BLOCK_SIZE
    if SHARED:
        first = tl.load(own_starts_ptr, mask=mask, other=0)
    return first


@triton.jit
def _place(place_ptr, is_shared):
    """A sequence's place among shared parts; no slots for one that has none, or is not begun here."""
    first_slot = tl.load(place_ptr, mask=is_shared, other=0)
    num_slots = tl.load(place_ptr + 1, mask=is_shared, other=0)
    return first_slot, num_slots, tl.load(place_ptr + 2, mask=is_shared, other=0)


@triton.jit
def _num_tiles(seq_lens, first_keys, TILE: tl.constexpr):
    """Tiles of sequences; a padding row has none."""
    return tl.where(seq_lens > 0, tl.maximum(tl.cdiv(seq_lens - first_keys, TILE), 1), 0)
