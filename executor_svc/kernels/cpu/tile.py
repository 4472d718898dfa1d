"""The micro-kernel under every product here: a few rows times a panel, accumulated in registers.

Knows registers. Does not know weights, caches or threads.

    out[m, c] = sum over k of x[m, k] * w[k, c]       for m < rows, c in two vectors of columns
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import errors
from numba.extending import intrinsic

from executor_svc.kernels.cpu.compile import named
from executor_svc.kernels.cpu.vector import F32, I8_POINTER, I32, I64, LANES, VF32, call_llvm, constant, load_at, splat, widen

MAX_ROWS = 12 if LANES == 16 else 6
"""Rows of a tile: two vectors of accumulators per row, two weights and a broadcast fit the registers."""


GROUP_SHIFT = 5
"""Log2 of the weights along depth that share an int8 scale."""


@intrinsic(prefer_literal=True)
def _tile(
    typing: Any,
    x: Any,
    x_stride: Any,
    w0: Any,
    w1: Any,
    w_stride: Any,
    scales: Any,
    depth: Any,
    ahead: Any,
    ahead_step: Any,
    out: Any,
    out_stride: Any,
    rows: Any,
    dtype: Any,
    accumulate: Any,
) -> Any:
    """See tile; rows, dtype and accumulate are literals."""
    if not isinstance(rows, types.IntegerLiteral) or not isinstance(dtype, types.StringLiteral):
        raise errors.RequireLiteralValue("rows and dtype must be literals")
    num_rows = rows.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")  # a dozen unrolled tiles: one copy is enough, compiling takes long
        x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride = args[:11]
        x_rows = [builder.add(x, builder.mul(x_stride, I64(m))) for m in range(num_rows)]
        out_rows = [builder.add(out, builder.mul(out_stride, I64(m))) for m in range(num_rows)]
        out_cells = [[row, builder.add(row, I64(64))] for row in out_rows]
        if accumulate.literal_value:
            start = [[load_at(builder, cell, VF32, 4) for cell in cells] for cells in out_cells]
        else:
            start = [[constant(0.0)] * 2 for _ in range(num_rows)]
        entry = builder.block
        loop, done = builder.append_basic_block("depth"), builder.append_basic_block("done")
        builder.branch(loop)

        builder.position_at_end(loop)
        k = builder.phi(I64)
        k.add_incoming(I64(0), entry)
        sums = [[builder.phi(VF32) for _ in range(2)] for _ in range(num_rows)]
        offset = builder.mul(k, w_stride)
        weights = [widen(builder, builder.add(w, offset), dtype.literal_value) for w in (w0, w1)]
        if dtype.literal_value == "i8":
            group = builder.add(scales, builder.mul(builder.lshr(k, I64(GROUP_SHIFT)), I64(128)))
            weights = [builder.fmul(w, load_at(builder, builder.add(group, I64(64 * r)), VF32, 4)) for r, w in enumerate(weights)]
        far = builder.inttoptr(builder.add(ahead, builder.mul(k, ahead_step)), I8_POINTER)
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [far, I32(0), I32(2), I32(1)])
        x_offset = builder.mul(k, I64(4))
        updated = []
        for m in range(num_rows):
            factor = splat(builder, load_at(builder, builder.add(x_rows[m], x_offset), F32, 4))
            updated.append(
                [call_llvm(builder, f"llvm.fma.v{LANES}f32", VF32, [weights[r], factor, sums[m][r]]) for r in range(2)]
            )
        following = builder.add(k, I64(1))
        k.add_incoming(following, loop)
        for m in range(num_rows):
            for r in range(2):
                sums[m][r].add_incoming(start[m][r], entry)
                sums[m][r].add_incoming(updated[m][r], loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)

        builder.position_at_end(done)
        for m in range(num_rows):
            for r in range(2):
                builder.store(updated[m][r], builder.inttoptr(out_cells[m][r], VF32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 11), rows, dtype, accumulate), codegen


def _make_tile(dtype: str, accumulate: bool) -> Any:
    """Compiles the choice of a tile by its number of rows; numba has no loop over literals, so the cases are written out."""

    @named(f"add_{dtype}" if accumulate else dtype)
    def tile(rows, x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride):  # type: ignore[no-untyped-def]
        if rows == 1:
            _tile(x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride, 1, dtype, accumulate)
        elif rows == 2:
            _tile(x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride, 2, dtype, accumulate)
        elif rows == 3:
            _tile(x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride, 3, dtype, accumulate)
        elif rows == 4:
            _tile(x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride, 4, dtype, accumulate)
        elif rows == 5:
            _tile(x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride, 5, dtype, accumulate)
        elif rows == 6:
            _tile(x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride, 6, dtype, accumulate)
        elif rows == 7:
            _tile(x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride, 7, dtype, accumulate)
        elif rows == 8:
            _tile(x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride, 8, dtype, accumulate)
        elif rows == 9:
            _tile(x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride, 9, dtype, accumulate)
        elif rows == 10:
            _tile(x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride, 10, dtype, accumulate)
        elif rows == 11:
            _tile(x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride, 11, dtype, accumulate)
        else:
            _tile(x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride, 12, dtype, accumulate)

    return tile


# tile_*(rows, x, x_stride, w0, w1, w_stride, scales, depth, ahead, ahead_step, out, out_stride): strides in bytes, addresses
# as int64; w0 and w1 are the first rows of the two vectors of columns, out's second vector is 16 columns after its first.
# scales is for int8 alone: float32 [depth / 32, 32]. Each step of depth prefetches a line at ahead + k * ahead_step.
# add_tile_* adds to out.
tile_f32 = _make_tile("f32", False)
tile_bf16 = _make_tile("bf16", False)
tile_i8 = _make_tile("i8", False)
add_tile_f32 = _make_tile("f32", True)
add_tile_bf16 = _make_tile("bf16", True)
