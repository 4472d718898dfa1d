"""Products with packed weights: one streaming kernel for every number of rows.

Knows the packed layout (packed_weight.py). Does not know models.

    panel p of the weight:  in_features x 32 outputs, read once from its first byte to its last, for any number of rows
    rows of x:              in tiles of at most MAX_ROWS, accumulated in registers over all of in_features

While the tiles of one panel are computed, the next panel is fetched: memory and arithmetic overlap. A tile ends in a small
buffer, where bias, activation and residual are applied on the way out.

Threads work in pairs that share a range of panels and walk towards each other from its ends, each reading memory in order:
a thread whose core has other things to do is waited for as long as one panel takes, not half of the product.
"""

from typing import Any

import numpy as np
from numba import njit

from executor_svc.kernels.cpu.compile import FIRST_ARG, NUM_COUNTERS, claim, kernel, named, num_threads, thread_idx
from executor_svc.kernels.cpu.exponential import vexp, vtanh
from executor_svc.kernels.cpu.tile import GROUP_SHIFT, MAX_ROWS, tile_bf16, tile_f32, tile_i8
from executor_svc.kernels.cpu.vector import (
    LANES,
    load_i64,
    vload,
    vload_first,
    vsplat,
    vstore,
    vstore_first,
)

PANEL = 32
"""Outputs of a panel."""
PLAIN, ADD, SILU_GATED, GELU_TANH_GATED = 0, 1, 2, 3
"""What happens to a product: stored; added to out; act(first 16 columns of a panel) * last 16 columns, stored."""
ACTIVATIONS = {"silu": SILU_GATED, "gelu_tanh": GELU_TANH_GATED}
"""Modes by the activation's name."""

_NEAR = 4096
"""Bytes that a single tile fetches ahead in its own panel: it is over too soon to fetch the next."""

_CHUNK_BYTES = 768 << 10
"""Of x, that stay in the second-level cache."""

# Fields of the arguments, from FIRST_ARG on. Strides are in bytes; scales and bias are 0 if there are none.
(_X, _X_STRIDE, _NUM_ROWS, _IN, _WEIGHT, _SCALES, _BIAS, _NUM_PANELS, _OUT, _OUT_STRIDE, _OUT_FEATURES, _MODE) = range(
    FIRST_ARG, FIRST_ARG + 12
)
FIELDS = "12q"


@njit(error_model="numpy")
def activate(gate, mode):  # type: ignore[no-untyped-def]
    """A vector of gates, activated as SILU_GATED or GELU_TANH_GATED says."""
    one = vsplat(np.float32(1.0))
    if mode == SILU_GATED:
        return gate / (one + vexp(vsplat(np.float32(0.0)) - gate))
    cubic = gate * gate * gate
    inner = (gate + cubic * vsplat(np.float32(0.044715))) * vsplat(np.float32(0.7978845608028654))
    return gate * vsplat(np.float32(0.5)) * (one + vtanh(inner))


@njit(error_model="numpy")
def finish_tile(args, cells, rows, row, panel):  # type: ignore[no-untyped-def]
    """Adds bias, activates, adds and stores a tile's cells [rows, PANEL]."""
    out, out_stride, out_features = load_i64(args, _OUT), load_i64(args, _OUT_STRIDE), load_i64(args, _OUT_FEATURES)
    bias, mode = load_i64(args, _BIAS), load_i64(args, _MODE)
    if bias != 0:
        for m in range(rows):
            for column in range(0, PANEL, LANES):
                cell = cells + 4 * (m * PANEL + column)
                vstore(cell, vload(cell, "f32") + vload(bias + 4 * (panel * PANEL + column), "f32"), "f32")
    width = PANEL if mode <= ADD else PANEL // 2
    for m in range(rows):
        target = out + (row + m) * out_stride + 4 * panel * width
        for column in range(0, width, LANES):
            value = vload(cells + 4 * (m * PANEL + column), "f32")
            left = out_features - panel * width - column
            if mode >= SILU_GATED:
                value = activate(value, mode) * vload(cells + 4 * (m * PANEL + column + PANEL // 2), "f32")
            if left >= LANES:
                if mode == ADD:
                    value = value + vload(target + 4 * column, "f32")
                vstore(target + 4 * column, value, "f32")
            elif left > 0:
                if mode == ADD:
                    value = value + vload_first(target + 4 * column, left, "f32")
                vstore_first(target + 4 * column, value, left, "f32")


def _make(dtype: str, itemsize: int, tile: Any) -> Any:
    """The kernel's body for weights of one dtype."""
    width = PANEL * itemsize

    @named(dtype)
    def run(args):  # type: ignore[no-untyped-def]
        x, x_stride, num_rows = load_i64(args, _X), load_i64(args, _X_STRIDE), load_i64(args, _NUM_ROWS)
        weight, scales = load_i64(args, _WEIGHT), load_i64(args, _SCALES)
        num_panels, depth = load_i64(args, _NUM_PANELS), load_i64(args, _IN)
        thread, threads = thread_idx(args), num_threads(args)
        buffer = np.empty(MAX_ROWS * PANEL + 16, np.float32)
        cells = (buffer.ctypes.data + 63) // 64 * 64
        scale_width = 4 * PANEL * ((depth + (1 << GROUP_SHIFT) - 1) >> GROUP_SHIFT)
        # Rows in chunks that stay in the second-level cache while all panels pass by.
        num_chunks = max((num_rows * depth * 4 + _CHUNK_BYTES - 1) // _CHUNK_BYTES, 1)
        num_chunks = min(num_chunks, (num_rows + MAX_ROWS - 1) // MAX_ROWS)
        pair = thread // 2
        is_paired = 2 * pair + 1 < threads and pair < NUM_COUNTERS
        first = num_panels * 2 * pair // threads
        num_shared = num_panels * min(2 * pair + 2, threads) // threads - first
        downward = thread % 2 == 1
        num_items = num_chunks * num_shared
        if downward and not is_paired:  # beyond the counters, a pair's first thread works alone
            num_items = 0
        for own in range(num_items):
            if is_paired and claim(args, pair) >= num_items:
                break
            item = num_items - 1 - own if downward else own
            chunk, panel = item // num_shared, first + item % num_shared
            chunk_start = num_rows * chunk // num_chunks
            chunk_rows = num_rows * (chunk + 1) // num_chunks - chunk_start
            # Two tiles fetch the next panel meanwhile; see _NEAR for a single one.
            num_tiles = max((chunk_rows + MAX_ROWS - 1) // MAX_ROWS, 2 if chunk_rows >= 6 else 1)
            ahead_step = max(width // num_tiles, 1)
            start = weight + panel * depth * width
            following = start - depth * width if downward else start + depth * width
            panel_scales = scales + panel * scale_width
            for index in range(num_tiles):
                row = chunk_start + chunk_rows * index // num_tiles
                rows = chunk_start + chunk_rows * (index + 1) // num_tiles - row
                ahead = start + _NEAR if num_tiles == 1 else following + depth * index * ahead_step
                for strip in range(0, PANEL // 2, LANES):
                    w0 = start + strip * itemsize
                    tile(
                        rows, x + row * x_stride, x_stride, w0, w0 + PANEL // 2 * itemsize, width, panel_scales + 4 * strip,
                        depth, ahead, ahead_step, cells + 4 * strip, 4 * PANEL,
                    )  # fmt: skip
                finish_tile(args, cells, rows, row, panel)

    return run


_run_f32, _run_bf16, _run_i8 = _make("f32", 4, tile_f32), _make("bf16", 2, tile_bf16), _make("i8", 1, tile_i8)


@kernel(FIELDS)
def linear_f32(args: int) -> None:
    """Product with float32 weights."""
    _run_f32(args)


@kernel(FIELDS)
def linear_bf16(args: int) -> None:
    """Product with bfloat16 weights."""
    _run_bf16(args)


@kernel(FIELDS)
def linear_i8(args: int) -> None:
    """Product with int8 weights and a float32 scale for 32 of them along in_features."""
    _run_i8(args)
