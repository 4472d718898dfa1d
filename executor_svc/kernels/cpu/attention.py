"""Paged attention for packed batches: KV write with rotary embedding, then one pass over a list of independent items.

Knows the cache's layout (batch.py) and positions. Does not know models.

An item is (sequence, kv head, queries): the rows of a tile are queries x the heads that share the kv head, so a key is
loaded once for all of them. Keys come in spans of SPAN; each span's scores are computed, its softmax folded into the
running one, and its values added:

    rows x head_dim_k (scaled, rotated)  ·  K of 32 keys  ->  scores [rows, SPAN]  ->  weights  ·  V of 16 keys  ->  acc

A long decode is cut into num_splits items by keys; the parts are merged afterwards. Items go to threads by cost. Slots
outside a sequence's visible range are never multiplied, so stale or non-finite bytes there do no harm.
"""

from typing import Any

import numpy as np

from executor_svc.kernels.cpu.compile import FIRST_ARG, barrier, kernel, named, num_threads, thread_idx
from executor_svc.kernels.cpu.exponential import vexp
from executor_svc.kernels.cpu.softmax import NEGATIVE_INFINITY, fold_softmax
from executor_svc.kernels.cpu.tile import MAX_ROWS, add_tile_bf16, add_tile_f32, tile_bf16, tile_f32
from executor_svc.kernels.cpu.vector import (
    LANES,
    keep_out_of_line,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    load_scalar,
    store_f32,
    store_scalar,
    vload,
    vload_first,
    vsplat,
    vstore,
    vstore_first,
)

SPAN = 256
"""Keys whose scores are held at once."""
SUBTILE = 16
"""Keys or columns of one vector of the tile."""

# Fields of the arguments, from FIRST_ARG on.
(
    _QUERY, _QUERY_TOKEN_STRIDE, _QUERY_HEAD_STRIDE, _KEY, _KEY_TOKEN_STRIDE, _KEY_HEAD_STRIDE,
    _VALUE, _VALUE_TOKEN_STRIDE, _VALUE_HEAD_STRIDE, _COS, _SIN, _ROTARY_DIM,
    _KEY_CACHE, _VALUE_CACHE, _BLOCK_STRIDE_KEY, _BLOCK_STRIDE_VALUE, _SLOTS, _TABLES, _TABLE_WIDTH, _BOUNDS, _LENGTHS,
    _NUM_SEQS, _NUM_DECODES, _NUM_TOKENS, _BLOCK_SIZE, _NUM_HEADS, _NUM_KV_HEADS, _DIM_K, _DIM_V,
    _WINDOW, _SINKS, _OUT, _SCRATCH, _SCRATCH_BYTES, _TILE_QUERIES, _NUM_SPLITS, _PARTIALS,
    _SCALE, _SOFTCAP,
) = range(FIRST_ARG, FIRST_ARG + 39)  # fmt: skip
FIELDS = "37q2d"
NUM_FIELDS = FIRST_ARG + 39
KEY_CACHE, VALUE_CACHE, WINDOW = _KEY_CACHE, _VALUE_CACHE, _WINDOW
"""What differs between the layers of a step."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


def _make(dtype: str, itemsize: int, tile: Any, add_tile: Any) -> Any:
    """The kernels' bodies for caches of one dtype; queries, keys, values and results are float32."""

    @named(dtype)
    def rotate(args, token, source, target, dim, scale):  # type: ignore[no-untyped-def]
        """Writes one head [dim] as float32, rotated if there is a rotary embedding, times scale."""
        keep_out_of_line()
        cos = load_i64(args, _COS)
        rotary = load_i64(args, _ROTARY_DIM) if cos != 0 else 0
        factor = vsplat(scale)
        half = rotary // 2
        if cos != 0:
            cos = cos + 4 * token * rotary
            sin = load_i64(args, _SIN) + 4 * token * rotary
            for i in range(0, half, LANES):
                n = min(LANES, half - i)
                low, high = vload_first(source + 4 * i, n, "f32"), vload_first(source + 4 * (half + i), n, "f32")
                cos_low, cos_high = vload_first(cos + 4 * i, n, "f32"), vload_first(cos + 4 * (half + i), n, "f32")
                sin_low, sin_high = vload_first(sin + 4 * i, n, "f32"), vload_first(sin + 4 * (half + i), n, "f32")
                vstore_first(target + 4 * i, (low * cos_low - high * sin_low) * factor, n, "f32")
                vstore_first(target + 4 * (half + i), (high * cos_high + low * sin_high) * factor, n, "f32")
        for i in range(rotary, dim, LANES):
            n = min(LANES, dim - i)
            vstore_first(target + 4 * i, vload_first(source + 4 * i, n, "f32") * factor, n, "f32")

    @named(dtype)
    def write_kv(args, scratch):  # type: ignore[no-untyped-def]
        """Writes this thread's share of the step's keys and values."""
        thread, threads = thread_idx(args), num_threads(args)
        num_tokens, num_kv_heads = load_i64(args, _NUM_TOKENS), load_i64(args, _NUM_KV_HEADS)
        block_size, dim_k, dim_v = load_i64(args, _BLOCK_SIZE), load_i64(args, _DIM_K), load_i64(args, _DIM_V)
        for token in range(num_tokens * thread // threads, num_tokens * (thread + 1) // threads):
            slot = load_i64(load_i64(args, _SLOTS), token)
            block, offset = slot // block_size, slot % block_size
            for head in range(num_kv_heads):
                source = (
                    load_i64(args, _KEY) + token * load_i64(args, _KEY_TOKEN_STRIDE) + head * load_i64(args, _KEY_HEAD_STRIDE)
                )
                rotate(args, token, source, scratch, dim_k, _ONE)
                target = load_i64(args, _KEY_CACHE) + block * load_i64(args, _BLOCK_STRIDE_KEY)
                target += (head * dim_k * block_size + offset) * itemsize
                for i in range(dim_k):
                    store_scalar(target + i * block_size * itemsize, load_f32(scratch + 4 * i), dtype)
                source = load_i64(args, _VALUE) + token * load_i64(args, _VALUE_TOKEN_STRIDE)
                source += head * load_i64(args, _VALUE_HEAD_STRIDE)
                target = load_i64(args, _VALUE_CACHE) + block * load_i64(args, _BLOCK_STRIDE_VALUE)
                target += (head * block_size + offset) * dim_v * itemsize
                for i in range(0, dim_v, LANES):
                    n = min(LANES, dim_v - i)
                    vstore_first(target + i * itemsize, vload_first(source + 4 * i, n, "f32"), n, dtype)

    @named(dtype)
    def key_address(args, seq, head, position):  # type: ignore[no-untyped-def]
        """Address of the first dimension of a position's key."""
        block_size = load_i64(args, _BLOCK_SIZE)
        block = load_i32(load_i64(args, _TABLES), seq * load_i64(args, _TABLE_WIDTH) + position // block_size)
        start = load_i64(args, _KEY_CACHE) + block * load_i64(args, _BLOCK_STRIDE_KEY)
        return start + (head * load_i64(args, _DIM_K) * block_size + position % block_size) * itemsize

    @named(dtype)
    def value_address(args, seq, head, position):  # type: ignore[no-untyped-def]
        """Address of the first dimension of a position's value."""
        block_size = load_i64(args, _BLOCK_SIZE)
        block = load_i32(load_i64(args, _TABLES), seq * load_i64(args, _TABLE_WIDTH) + position // block_size)
        start = load_i64(args, _VALUE_CACHE) + block * load_i64(args, _BLOCK_STRIDE_VALUE)
        return start + (head * block_size + position % block_size) * load_i64(args, _DIM_V) * itemsize

    @named(dtype)
    def score_span(args, seq, head, rows, first, last, queries, scores, gathered):  # type: ignore[no-untyped-def]
        """Scores [rows, SPAN] of keys first <= position < last; first is a multiple of SUBTILE."""
        keep_out_of_line()
        block_size, dim_k = load_i64(args, _BLOCK_SIZE), load_i64(args, _DIM_K)
        is_direct = block_size % SUBTILE == 0
        for position in range(first, last, 2 * SUBTILE):
            column = scores + 4 * (position - first)
            has_second = position + SUBTILE < last
            if is_direct:
                w0 = key_address(args, seq, head, position)
                w1 = key_address(args, seq, head, position + SUBTILE) if has_second else w0
            else:
                for j in range(min(2 * SUBTILE, last - position)):
                    source = key_address(args, seq, head, position + j)
                    for i in range(dim_k):
                        store_f32(gathered + 4 * (i * 2 * SUBTILE + j), load_scalar(source + i * block_size * itemsize, dtype))
                w0, w1 = gathered, gathered + 4 * SUBTILE
            num_tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
            for index in range(num_tiles):
                row = rows * index // num_tiles
                count = rows * (index + 1) // num_tiles - row
                x, out = queries + 4 * row * dim_k, column + 4 * row * SPAN
                for strip in range(0, SUBTILE, LANES):
                    if is_direct:
                        tile(
                            count, x, 4 * dim_k, w0 + strip * itemsize, w1 + strip * itemsize, block_size * itemsize, 0,
                            dim_k, w0, 0, out + 4 * strip, 4 * SPAN,
                        )  # fmt: skip
                    else:
                        tile_f32(
                            count, x, 4 * dim_k, w0 + 4 * strip, w1 + 4 * strip, 8 * SUBTILE, 0, dim_k, w0, 0,
                            out + 4 * strip, 4 * SPAN,
                        )  # fmt: skip

    @named(dtype)
    def add_values(args, seq, head, rows, first, low, last, scores, acc, acc_width, gathered):  # type: ignore[no-untyped-def]
        """Adds weights [rows, SPAN] times values of low <= position < last to acc; column 0 is position first."""
        keep_out_of_line()
        block_size, dim_v = load_i64(args, _BLOCK_SIZE), load_i64(args, _DIM_V)
        is_direct = block_size % SUBTILE == 0 and dim_v % SUBTILE == 0
        num_tiles = (rows + MAX_ROWS - 1) // MAX_ROWS
        for subtile in range(first, last, SUBTILE):
            position = max(subtile, low)
            depth = min(subtile + SUBTILE, last) - position
            if depth <= 0:
                continue
            if is_direct:
                source, stride, size = value_address(args, seq, head, position), dim_v * itemsize, itemsize
            else:
                source, stride, size = gathered, 4 * acc_width, 4
                for j in range(depth):
                    origin = value_address(args, seq, head, position + j)
                    for i in range(0, dim_v, LANES):
                        n = min(LANES, dim_v - i)
                        vstore(gathered + 4 * (j * acc_width + i), vload_first(origin + i * itemsize, n, dtype), "f32")
            for index in range(num_tiles):
                row = rows * index // num_tiles
                count = rows * (index + 1) // num_tiles - row
                x = scores + 4 * (row * SPAN + position - first)
                for column in range(0, acc_width, 2 * SUBTILE):
                    w0 = source + column * size
                    w1 = w0 + SUBTILE * size if not is_direct or column + SUBTILE < dim_v else w0
                    out = acc + 4 * (row * acc_width + column)
                    for strip in range(0, SUBTILE, LANES):
                        if is_direct:
                            add_tile(
                                count, x, 4 * SPAN, w0 + strip * size, w1 + strip * size, stride, 0, depth, w0, 0,
                                out + 4 * strip, 4 * acc_width,
                            )  # fmt: skip
                        else:
                            add_tile_f32(
                                count, x, 4 * SPAN, w0 + strip * size, w1 + strip * size, stride, 0, depth, w0, 0,
                                out + 4 * strip, 4 * acc_width,
                            )  # fmt: skip

    @named(dtype)
    def attend(args, scratch, seq, head, token, num_queries, split):  # type: ignore[no-untyped-def]
        """One item: queries token .. token + num_queries of a sequence for the heads of one kv head."""
        keep_out_of_line()
        num_heads, num_kv_heads = load_i64(args, _NUM_HEADS), load_i64(args, _NUM_KV_HEADS)
        dim_k, dim_v = load_i64(args, _DIM_K), load_i64(args, _DIM_V)
        group = num_heads // num_kv_heads
        rows = num_queries * group
        acc_width = (dim_v + 2 * SUBTILE - 1) // (2 * SUBTILE) * (2 * SUBTILE)
        window, sinks, num_splits = load_i64(args, _WINDOW), load_i64(args, _SINKS), load_i64(args, _NUM_SPLITS)
        max_rows = load_i64(args, _TILE_QUERIES) * group

        queries = scratch
        scores = queries + 4 * max_rows * ((dim_k + 15) // 16 * 16)
        acc = scores + 4 * max_rows * SPAN
        maxima = acc + 4 * max_rows * acc_width
        sums = maxima + 4 * ((max_rows + 15) // 16 * 16)
        gathered = sums + 4 * ((max_rows + 15) // 16 * 16)

        scale, softcap = load_f64(args, _SCALE), load_f64(args, _SOFTCAP)
        for q in range(num_queries):
            source = load_i64(args, _QUERY) + (token + q) * load_i64(args, _QUERY_TOKEN_STRIDE)
            for g in range(group):
                head_source = source + (head * group + g) * load_i64(args, _QUERY_HEAD_STRIDE)
                rotate(args, token + q, head_source, queries + 4 * (q * group + g) * dim_k, dim_k, scale)
        for row in range(rows):
            if sinks != 0 and split == 0:
                store_f32(maxima + 4 * row, load_f32(sinks + 4 * (head * group + row % group)))
                store_f32(sums + 4 * row, _ONE)
            else:
                store_f32(maxima + 4 * row, NEGATIVE_INFINITY)
                store_f32(sums + 4 * row, _ZERO)
        zero = vsplat(_ZERO)
        for c in range(0, rows * acc_width, LANES):
            vstore(acc + 4 * c, zero, "f32")

        # Positions of the item's queries, and the keys that any of them sees.
        bounds, lengths = load_i64(args, _BOUNDS), load_i64(args, _LENGTHS)
        query_position = load_i32(lengths, seq) - (load_i32(bounds, seq + 1) - token)
        end = query_position + num_queries
        begin = max(0, query_position - window + 1) if window > 0 else 0
        if num_splits > 1 and seq < load_i64(args, _NUM_DECODES):
            share = ((end - begin + num_splits - 1) // num_splits + SPAN - 1) // SPAN * SPAN
            begin = begin // SUBTILE * SUBTILE + split * share if split > 0 else begin
            end = min(end, begin // SUBTILE * SUBTILE + share)
        for first in range(begin // SUBTILE * SUBTILE, end, SPAN):
            last = min(first + SPAN, end)
            width = (last - first + 2 * SUBTILE - 1) // (2 * SUBTILE) * (2 * SUBTILE)
            score_span(args, seq, head, rows, first, last, queries, scores, gathered)
            for row in range(rows):
                position = query_position + row // group
                low = max(begin, position - window + 1 if window > 0 else 0) - first
                high = min(position + 1, last) - first
                line, acc_row = scores + 4 * row * SPAN, acc + 4 * row * acc_width
                fold_softmax(softcap, max(low, 0), high, width, line, acc_row, acc_width, maxima + 4 * row, sums + 4 * row)
            add_values(args, seq, head, rows, first, max(first, begin), last, scores, acc, acc_width, gathered)

        if num_splits > 1 and seq < load_i64(args, _NUM_DECODES):
            part_floats = acc_width + 2 * SUBTILE
            for row in range(rows):
                part = load_i64(args, _PARTIALS) + 4 * part_floats * ((seq * num_heads + head * group + row) * num_splits + split)
                for c in range(0, acc_width, LANES):
                    vstore(part + 4 * c, vload(acc + 4 * (row * acc_width + c), "f32"), "f32")
                store_f32(part + 4 * acc_width, load_f32(maxima + 4 * row))
                store_f32(part + 4 * (acc_width + SUBTILE), load_f32(sums + 4 * row))
            return
        for row in range(rows):
            out = load_i64(args, _OUT)
            out += ((token + row // group) * num_heads + head * group + row % group) * dim_v * 4
            inverse = vsplat(_ONE / load_f32(sums + 4 * row))
            for c in range(0, dim_v, LANES):
                value = vload(acc + 4 * (row * acc_width + c), "f32") * inverse
                vstore_first(out + 4 * c, value, min(LANES, dim_v - c), "f32")

    @named(dtype)
    def walk(args, scratch, run_from, run_to):  # type: ignore[no-untyped-def]
        """Goes through the items in order; runs those whose first unit of cost is in run_from <= cost < run_to.

        Returns the cost of all.
        """
        bounds, lengths = load_i64(args, _BOUNDS), load_i64(args, _LENGTHS)
        num_kv_heads, tile_queries = load_i64(args, _NUM_KV_HEADS), load_i64(args, _TILE_QUERIES)
        num_decodes, num_splits, window = load_i64(args, _NUM_DECODES), load_i64(args, _NUM_SPLITS), load_i64(args, _WINDOW)
        cost = 0
        for seq in range(load_i64(args, _NUM_SEQS)):
            start, stop, length = load_i32(bounds, seq), load_i32(bounds, seq + 1), load_i32(lengths, seq)
            splits = num_splits if seq < num_decodes else 1
            for head in range(num_kv_heads):
                for token in range(start, stop, tile_queries):
                    num_queries = min(tile_queries, stop - token)
                    keys = length - (stop - token) + num_queries
                    if window > 0:
                        keys = min(keys, window + num_queries)
                    for split in range(splits):
                        if run_from <= cost and cost < run_to:
                            attend(args, scratch, seq, head, token, num_queries, split)
                        # A key costs a part that is shared by the rows (its load) and one per row.
                        cost += (keys // splits + 32) * (num_queries + 3)
        return cost

    @named(dtype)
    def merge(args):  # type: ignore[no-untyped-def]
        """Merges the parts of split decodes."""
        thread, threads = thread_idx(args), num_threads(args)
        num_heads, dim_v = load_i64(args, _NUM_HEADS), load_i64(args, _DIM_V)
        num_splits = load_i64(args, _NUM_SPLITS)
        acc_width = (dim_v + 2 * SUBTILE - 1) // (2 * SUBTILE) * (2 * SUBTILE)
        part_bytes = 4 * (acc_width + 2 * SUBTILE)
        count = load_i64(args, _NUM_DECODES) * num_heads
        for index in range(count * thread // threads, count * (thread + 1) // threads):
            parts = load_i64(args, _PARTIALS) + index * num_splits * part_bytes
            largest = NEGATIVE_INFINITY
            for split in range(num_splits):
                largest = max(largest, load_f32(parts + split * part_bytes + 4 * acc_width))
            # A decode's token is its sequence's index: decodes come first.
            out = load_i64(args, _OUT) + index * dim_v * 4
            for c in range(0, dim_v, LANES):
                total, weights = vsplat(_ZERO), vsplat(_ZERO)
                for split in range(num_splits):
                    part = parts + split * part_bytes
                    factor = vexp(vsplat(np.float32(load_f32(part + 4 * acc_width) - largest)))
                    total = total + vload(part + 4 * c, "f32") * factor
                    weights = weights + vsplat(load_f32(part + 4 * (acc_width + SUBTILE))) * factor
                vstore_first(out + 4 * c, total / weights, min(LANES, dim_v - c), "f32")

    @named(dtype)
    def run(args):  # type: ignore[no-untyped-def]
        thread, threads = thread_idx(args), num_threads(args)
        scratch = load_i64(args, _SCRATCH) + thread * load_i64(args, _SCRATCH_BYTES)
        write_kv(args, scratch)
        barrier(args)
        total = walk(args, scratch, 0, 0)
        walk(args, scratch, total * thread // threads, total * (thread + 1) // threads)
        if load_i64(args, _NUM_SPLITS) > 1:
            barrier(args)
            merge(args)

    return run


_run_f32 = _make("f32", 4, tile_f32, add_tile_f32)
_run_bf16 = _make("bf16", 2, tile_bf16, add_tile_bf16)


@kernel(FIELDS)
def attention_f32(args: int) -> None:
    """Attention over a float32 cache."""
    _run_f32(args)


@kernel(FIELDS)
def attention_bf16(args: int) -> None:
    """Attention over a bfloat16 cache; the step's own keys and values are rounded when they are written."""
    _run_bf16(args)
