"""The micro-kernel of split products on the processor's matrix unit: 32 rows times 32 columns of numbers in three parts each.

Knows tile registers and how to be allowed to use them. Does not know weights, caches or threads.

A float32 is the sum of three bfloat16 of 8 bits each, high, middle and low; of the nine products of parts the three below
2^-24 are left out, and the sums are float32:

    x * w  =  x0*w0 + (x0*w1 + x1*w0) + (x0*w2 + x1*w1 + x2*w0)        error as of a product in float32

The idea is that of Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations" (2019, arXiv 1904.06376): six products on a unit that is 16 times as fast.
"""

import ctypes
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from executor_svc.kernels.cpu.vector import (
    I8,
    I8_POINTER,
    I32,
    I64,
    LANES,
    VF32,
    VI32,
    call_llvm,
    int_constant,
    load_at,
)

TILE_BYTES = 1024
"""16 rows of 64 bytes."""
CHUNK = 32
"""Numbers along depth in one tile of bfloat16."""
NUM_PARTS = 3
BLOCK_ROWS = 32
"""Rows of a block, two tiles of them; it is as many columns wide."""

_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), Linux 5.16
_SYS_ARCH_PRCTL = 158

TILE_CONFIG = np.zeros(80, np.uint8)
"""All eight registers as 16 rows of 64 bytes: palette 1, bytes of a row from byte 16 on, rows from byte 48 on. 16 spare bytes."""
TILE_CONFIG[0] = 1
TILE_CONFIG[16:32:2] = 64
TILE_CONFIG[48:56] = 16


@cache
def has_matrix_unit() -> bool:
    """Whether this process may multiply bfloat16 on the matrix unit (AMX); asks the system for it on the first call."""
    features = binding.get_host_cpu_features()
    if LANES != 16 or not (features.get("amx-tile", False) and features.get("amx-bf16", False)):
        return False
    try:
        return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)
    except (AttributeError, OSError):
        return False


def _call(builder: ir.IRBuilder, name: str, *args: Any) -> None:
    call_llvm(builder, f"llvm.x86.{name}", ir.VoidType(), list(args))


def _pointer(builder: ir.IRBuilder, address: Any) -> Any:
    return builder.inttoptr(address, I8_POINTER)


@intrinsic
def configure_tiles(typing: Any, config: Any) -> Any:
    """Sets up the calling thread's tile registers as the 64 bytes at an address say."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _call(builder, "ldtilecfg", _pointer(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release_tiles(typing: Any) -> Any:
    """Gives the registers back: until then the system saves 8 KiB whenever it switches threads."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


def _split_pair(builder: ir.IRBuilder, first: Any, second: Any, out: Any, part_stride: Any) -> None:
    rest = [load_at(builder, address, VF32, 4) for address in (first, second)]
    for part in range(NUM_PARTS):
        bits = []
        for i in range(2):
            rounded = builder.add(builder.bitcast(rest[i], VI32), int_constant(0x8000))
            bits.append(builder.and_(rounded, int_constant(-0x10000)))
            rest[i] = builder.fsub(rest[i], builder.bitcast(bits[i], VF32))
        pairs = builder.or_(builder.lshr(bits[0], int_constant(16)), bits[1])
        target = builder.add(out, builder.mul(part_stride, I64(part)))
        builder.store(pairs, builder.inttoptr(target, VI32.as_pointer()), align=64)


@intrinsic
def split_pair(typing: Any, first: Any, second: Any, out: Any, part_stride: Any) -> Any:
    """Splits 16 float32 at each of two addresses into three parts.

    Part p goes to out + p * part_stride as 16 pairs (of first, of second), which is how the unit wants its right operand. Each
    part is the rest rounded to 8 bits, ties away from zero.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _split_pair(builder, *args)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


_PRODUCTS = ((0, 2), (0, 1), (0, 0), (2, 0), (1, 0), (1, 1))
"""Parts of x and of w that are multiplied, in an order in which one of the two operands always stays in its registers."""
_PAIRS = [(i, half) for i in range(CHUNK // 2) for half in range(2)]
"""Of a chunk of a panel: (row along depth, columns) of every split_pair."""


def _prefetch(builder: ir.IRBuilder, address: Any, locality: int) -> None:
    call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [_pointer(builder, address), I32(0), I32(locality), I32(1)])


def _load_tile(builder: ir.IRBuilder, register: int, address: Any, stride: int) -> None:
    _call(builder, "tileloadd64", I8(register), _pointer(builder, address), I64(stride))


@intrinsic(prefer_literal=True)
def multiply_block(
    typing: Any,
    x0: Any,
    x1: Any,
    w: Any,
    num_chunks: Any,
    ahead: Any,
    lines_ahead: Any,
    panel: Any,
    out: Any,
    splits: Any,
) -> Any:
    """32 rows times 32 columns over num_chunks * CHUNK of depth, as float32 [32, 32].

    Registers 0 to 3 are sums, 4 and 5 a part of x, 6 and 7 a part of w.

    Addresses and numbers:
        x0: tiles of the first 16 rows: [num_chunks, NUM_PARTS] of them.
        x1: of the second 16.
        w: tiles of the columns: [num_chunks + 1, NUM_PARTS, 2].
        num_chunks: at least 1.
        ahead: address of memory to fetch into the second-level cache meanwhile.
        lines_ahead: lines of 64 bytes of it per chunk.
        panel: the columns' weights, float32 [num_chunks * CHUNK, 32].
        out: where the sums go.
        splits: a literal. True: of w only the first chunk is there, the others are split from the panel meanwhile; the vector
            units have nothing else to do.
    """

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x0, x1, w, num_chunks, ahead, lines_ahead, panel, out = args[:8]
        for i in range(4):
            _call(builder, "tilezero", I8(i))
        entry = builder.block
        loop, fetch, end_of_loop, done = (builder.append_basic_block(name) for name in ("chunk", "fetch", "end", "done"))
        builder.branch(loop)

        builder.position_at_end(loop)
        chunk = builder.phi(I64)
        chunk.add_incoming(I64(0), entry)
        following = builder.add(chunk, I64(1))
        has_following = builder.icmp_signed("<", following, num_chunks)
        x_offset = builder.mul(chunk, I64(NUM_PARTS * TILE_BYTES))
        sources = [builder.add(x, x_offset) for x in (x0, x1)]
        sources.append(builder.add(w, builder.mul(chunk, I64(2 * NUM_PARTS * TILE_BYTES))))
        next_w = builder.add(sources[2], I64(2 * NUM_PARTS * TILE_BYTES))
        # Past the last chunk the last one is split again, into tiles that nobody reads.
        next_rows = builder.add(panel, builder.mul(builder.select(has_following, following, chunk), I64(128 * CHUNK)))
        pairs = iter(_PAIRS if splits.literal_value else ())
        # What the next chunk loads is fetched into the first-level cache meanwhile, in equal portions.
        near = [
            builder.add(source, I64(size + line))
            for source, size in zip(sources, (3 * TILE_BYTES, 3 * TILE_BYTES, 6 * TILE_BYTES), strict=True)
            for line in range(0, size, 64)
        ]
        held: tuple[int | None, int | None] = (None, None)
        for step, (x_part, w_part) in enumerate(_PRODUCTS):
            if held[0] != x_part:
                for i in range(2):
                    _load_tile(builder, 4 + i, builder.add(sources[i], I64(x_part * TILE_BYTES)), 64)
            if held[1] != w_part:
                for i in range(2):
                    _load_tile(builder, 6 + i, builder.add(sources[2], I64((2 * w_part + i) * TILE_BYTES)), 64)
            held = (x_part, w_part)
            for i in range(4):
                _call(builder, "tdpbf16ps", I8(i), I8(4 + i // 2), I8(6 + i % 2))
                for row, half in islice(pairs, 2 if i < 2 else 1):  # 32 of them for 24 products
                    source = builder.add(next_rows, I64(128 * row + 64 * half))
                    target = builder.add(next_w, I64(64 * row + TILE_BYTES * half))
                    _split_pair(builder, source, builder.add(source, I64(128 * CHUNK // 2)), target, I64(2 * TILE_BYTES))
            for line in near[step :: len(_PRODUCTS)]:
                _prefetch(builder, line, 3)
        far = builder.add(ahead, builder.mul(builder.mul(chunk, lines_ahead), I64(64)))
        builder.cbranch(builder.icmp_signed(">", lines_ahead, I64(0)), fetch, end_of_loop)

        builder.position_at_end(fetch)
        index = builder.phi(I64)
        index.add_incoming(I64(0), loop)
        _prefetch(builder, builder.add(far, builder.mul(index, I64(64))), 2)
        next_line = builder.add(index, I64(1))
        index.add_incoming(next_line, fetch)
        builder.cbranch(builder.icmp_signed("<", next_line, lines_ahead), fetch, end_of_loop)

        builder.position_at_end(end_of_loop)
        chunk.add_incoming(following, end_of_loop)
        builder.cbranch(has_following, loop, done)

        builder.position_at_end(done)
        for i in range(4):
            corner = builder.add(out, I64(2048 * (i // 2) + 64 * (i % 2)))
            _call(builder, "tilestored64", I8(i), _pointer(builder, corner), I64(128))
        return context.get_dummy_value()

    return types.void(*([types.int64] * 8), splits), codegen
