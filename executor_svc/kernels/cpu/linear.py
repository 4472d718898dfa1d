"""Linear layers with packed weights: one streaming kernel for every number of rows.

Knows weights and their layout. Does not know models.

A weight [out_features, in_features] is stored as panels of 32 outputs, `[ceil(out_features / 32), in_features, 32]`: a
panel is read once, from its first byte to its last, for any number of rows. While the rows' tiles of one panel are
computed, the next panel is fetched. The panel of a gated product holds 16 gate columns and the 16 up columns that belong
to them, so that the activation is applied in registers' reach.
"""

from numba import njit

from executor_svc.kernels.cpu.compile import FIRST_ARG, kernel, num_threads, thread_idx
from executor_svc.kernels.cpu.tile import MAX_ROWS, tile_bf16, tile_f32, tile_i8
from executor_svc.kernels.cpu.vector import (
    LANES,
    load_f32,
    load_i64,
    vexp,
    vload,
    vload_first,
    vsplat,
    vstore,
    vstore_first,
    vtanh,
)
import numpy as np

PANEL = 32
PLAIN, ADD, SILU_GATED, GELU_TANH_GATED = 0, 1, 2, 3


@njit(error_model="numpy")  # type: ignore[misc]
def _activate(gate, mode):  # type: ignore[no-untyped-def]
    one = vsplat(np.float32(1.0))
    if mode == SILU_GATED:
        return gate / (one + vexp(vsplat(np.float32(0.0)) - gate))
    cubic = gate * gate * gate
    inner = (gate + cubic * vsplat(np.float32(0.044715))) * vsplat(np.float32(0.7978845608028654))
    return gate * vsplat(np.float32(0.5)) * (one + vtanh(inner))


@njit(error_model="numpy")  # type: ignore[misc]
def _finish(args, cells, rows, row, panel):  # type: ignore[no-untyped-def]
    """Scales, adds bias, activates, adds and stores a tile's cells [rows, PANEL]."""
    out = load_i64(args, FIRST_ARG + 2)
    out_features = load_i64(args, FIRST_ARG + 3)
    out_stride = load_i64(args, FIRST_ARG + 8)
    scale = load_i64(args, FIRST_ARG + 6)
    bias = load_i64(args, FIRST_ARG + 7)
    mode = load_i64(args, FIRST_ARG + 9)
    if scale != 0 or bias != 0:
        for m in range(rows):
            for column in range(0, PANEL, LANES):
                cell = cells + 4 * (m * PANEL + column)
                value = vload(cell, "f32")
                if scale != 0:
                    value = value * vload(scale + 4 * (panel * PANEL + column), "f32")
                if bias != 0:
                    value = value + vload(bias + 4 * (panel * PANEL + column), "f32")
                vstore(cell, value, "f32")
    width = PANEL if mode <= ADD else PANEL // 2
    for m in range(rows):
        target = out + (row + m) * out_stride + 4 * panel * width
        for column in range(0, width, LANES):
            value = vload(cells + 4 * (m * PANEL + column), "f32")
            left = out_features - panel * width - column
            if mode >= SILU_GATED:
                value = _activate(value, mode) * vload(cells + 4 * (m * PANEL + column + 16), "f32")
            if left >= LANES:
                if mode == ADD:
                    value = value + vload(target + 4 * column, "f32")
                vstore(target + 4 * column, value, "f32")
            elif left > 0:
                if mode == ADD:
                    value = value + vload_first(target + 4 * column, left, "f32")
                vstore_first(target + 4 * column, value, left, "f32")


def _make(tile, itemsize):  # type: ignore[no-untyped-def]
    """The kernel body for weights of one dtype."""
    width = PANEL * itemsize

    @njit(error_model="numpy")  # type: ignore[misc]
    def run(args):  # type: ignore[no-untyped-def]
        x = load_i64(args, FIRST_ARG + 0)
        weight = load_i64(args, FIRST_ARG + 1)
        num_panels = load_i64(args, FIRST_ARG + 4)
        depth = load_i64(args, FIRST_ARG + 5)
        num_rows = load_i64(args, FIRST_ARG + 10)
        x_stride = load_i64(args, FIRST_ARG + 11)
        thread, threads = thread_idx(args), num_threads(args)
        buffer = np.empty(MAX_ROWS * PANEL + 16, np.float32)
        cells = (buffer.ctypes.data + 63) // 64 * 64
        # Two tiles fetch the next panel meanwhile; a single one is over too soon and fetches ahead in its own.
        num_tiles = max((num_rows + MAX_ROWS - 1) // MAX_ROWS, 2 if num_rows >= 6 else 1)
        ahead_step = width // num_tiles if num_tiles < width else 1
        for panel in range(num_panels * thread // threads, num_panels * (thread + 1) // threads):
            start = weight + panel * depth * width
            for index in range(num_tiles):
                row = num_rows * index // num_tiles
                rows = num_rows * (index + 1) // num_tiles - row
                ahead = start + 4096 if num_tiles == 1 else start + depth * width + index * depth * ahead_step
                for strip in range(0, 16, LANES):
                    tile(
                        rows, x + row * x_stride, x_stride, start + strip * itemsize, start + (strip + 16) * itemsize, width,
                        depth, ahead, ahead_step, cells + 4 * strip, 4 * PANEL,
                    )  # fmt: skip
                _finish(args, cells, rows, row, panel)

    return run


_run_f32, _run_bf16, _run_i8 = _make(tile_f32, 4), _make(tile_bf16, 2), _make(tile_i8, 1)

# Fields: x, weight, out, out_features, num_panels, in_features, scale or 0, bias or 0, out_stride in bytes, mode, num_rows,
# x_stride in bytes.


@kernel("12q")
def linear_f32(args: int) -> None:
    _run_f32(args)


@kernel("12q")
def linear_bf16(args: int) -> None:
    _run_bf16(args)


@kernel("12q")
def linear_i8(args: int) -> None:
    _run_i8(args)
