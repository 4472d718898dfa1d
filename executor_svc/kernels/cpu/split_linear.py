"""Products of many rows with packed float32 weights, on the matrix unit.

Knows the packed layout and caches. Does not know models, nor when this product is used (packed_weight.py).

    part of the rows    split into tiles once by each thread that works on it; they stay in its second-level cache
    panel of weights    split while the first 32 rows of the part are multiplied, then the other rows pass by
    next panel          fetched meanwhile

The weights stay float32 in memory. Pairs of threads share rows, and walk through parts times panels from both ends: both split
different rows until they meet, and a thread whose core has other things to do is waited for as long as one panel takes.
"""

import torch
from torch import Tensor

from executor_svc.kernels.cpu.amx import (
    BLOCK_ROWS,
    CHUNK,
    NUM_PARTS,
    TILE_BYTES,
    TILE_CONFIG,
    configure_tiles,
    has_matrix_unit,
    multiply_block,
    release_tiles,
    split_pair,
)
from executor_svc.kernels.cpu.compile import FIRST_ARG, NUM_COUNTERS, claim, kernel, named, num_threads, thread_idx
from executor_svc.kernels.cpu.linear import FIELDS as LINEAR_FIELDS
from executor_svc.kernels.cpu.linear import PANEL, finish_tile
from executor_svc.kernels.cpu.vector import load_i64

# Fields of the arguments: those of linear.py, then these.
(_X, _X_STRIDE, _NUM_ROWS, _IN, _WEIGHT, _SCALES, _BIAS, _NUM_PANELS) = range(FIRST_ARG, FIRST_ARG + 8)
(_SCRATCH, _SCRATCH_BYTES, _TILE_CONFIG) = range(FIRST_ARG + 12, FIRST_ARG + 15)

_X_CHUNK_BYTES, _W_CHUNK_BYTES = NUM_PARTS * TILE_BYTES, 2 * NUM_PARTS * TILE_BYTES
"""Of the tiles of one CHUNK: of 16 rows of x, and of a panel."""
_BLOCK_BYTES = 4 * BLOCK_ROWS * PANEL

_PART_BYTES = 900 << 10
"""Of split rows, that stay in the second-level cache beside a split panel."""

_APART_BLOCKS = 16
"""From so many blocks on the two threads of a pair work on different rows: they split less, but both read all weights."""


@named("x")
def _split_rows(args, first_row, last_row, target):  # type: ignore[no-untyped-def]
    """Splits rows of x into tiles [row tiles, depth / CHUNK, NUM_PARTS]."""
    x, x_stride, num_chunks = load_i64(args, _X), load_i64(args, _X_STRIDE), load_i64(args, _IN) // CHUNK
    for first in range(first_row, last_row, 16):
        out = target + (first - first_row) // 16 * num_chunks * _X_CHUNK_BYTES
        for chunk in range(num_chunks):  # tile by tile: a row's lines are 1 KiB apart, they would share a few sets of the cache
            for i in range(min(16, last_row - first)):
                source = x + (first + i) * x_stride + 128 * chunk
                split_pair(source, source + 64, out + chunk * _X_CHUNK_BYTES + 64 * i, TILE_BYTES)


@named("w")
def _split_first_chunk(panel, target):  # type: ignore[no-untyped-def]
    """Splits the first CHUNK of a panel into tiles [NUM_PARTS, 2]; pairs are 16 apart along depth, as they are in x."""
    for i in range(16):
        source = panel + 4 * PANEL * i
        split_pair(source, source + 4 * PANEL * 16, target + 64 * i, 2 * TILE_BYTES)
        split_pair(source + 64, source + 4 * PANEL * 16 + 64, target + TILE_BYTES + 64 * i, 2 * TILE_BYTES)


@kernel(LINEAR_FIELDS + "3q")
def split_linear_f32(args: int) -> None:
    """Product with float32 weights in six products of bfloat16 parts; depth is a multiple of CHUNK."""
    num_rows, depth = load_i64(args, _NUM_ROWS), load_i64(args, _IN)
    weight, num_panels = load_i64(args, _WEIGHT), load_i64(args, _NUM_PANELS)
    thread, threads = thread_idx(args), num_threads(args)
    num_chunks = depth // CHUNK
    num_blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    row_tile_bytes = num_chunks * _X_CHUNK_BYTES
    tiles = (load_i64(args, _SCRATCH) + 63) // 64 * 64 + thread * load_i64(args, _SCRATCH_BYTES)
    own = tiles + _PART_BYTES + 2 * row_tile_bytes
    cells = own + (num_chunks + 1) * _W_CHUNK_BYTES
    configure_tiles(load_i64(args, _TILE_CONFIG))

    # A pair's rows are so many parts that a part stays in the second-level cache; its items are parts times panels.
    num_pairs = min((threads + 1) // 2, NUM_COUNTERS)
    pair = thread // 2
    is_paired = 2 * pair + 1 < threads
    pair_start, pair_end = num_blocks * pair // num_pairs, num_blocks * (pair + 1) // num_pairs
    pair_blocks = pair_end - pair_start
    num_parts = (2 * pair_blocks * row_tile_bytes + _PART_BYTES - 1) // _PART_BYTES
    if is_paired and pair_blocks >= _APART_BLOCKS:
        num_parts = num_parts + num_parts % 2
    num_parts = min(num_parts, pair_blocks)
    downward = thread % 2 == 1
    num_items = num_parts * num_panels
    if pair >= num_pairs:
        num_items = 0
    panel_bytes = 4 * PANEL * depth
    held = num_parts
    for taken in range(num_items):
        if is_paired and claim(args, pair) >= num_items:
            break
        item = num_items - 1 - taken if downward else taken
        part, panel = item // num_panels, item % num_panels
        first_block = pair_start + pair_blocks * part // num_parts
        last_block = pair_start + pair_blocks * (part + 1) // num_parts
        if part != held:
            _split_rows(args, first_block * BLOCK_ROWS, min(last_block * BLOCK_ROWS, num_rows), tiles)
            held = part
        start = weight + panel * panel_bytes
        following = start - panel_bytes if downward else start + panel_bytes
        _split_first_chunk(start, own)
        lines_ahead = max(4 * PANEL * CHUNK // 64 // (last_block - first_block), 1)
        for block in range(first_block, last_block):
            x = tiles + 2 * (block - first_block) * row_tile_bytes
            ahead = following + (block - first_block) * num_chunks * lines_ahead * 64
            if block == first_block:
                multiply_block(x, x + row_tile_bytes, own, num_chunks, ahead, lines_ahead, start, cells, True)
            else:
                multiply_block(x, x + row_tile_bytes, own, num_chunks, ahead, lines_ahead, start, cells, False)
            finish_tile(args, cells, min(BLOCK_ROWS, num_rows - block * BLOCK_ROWS), block * BLOCK_ROWS, panel)
    release_tiles()


_scratch: dict[int, Tensor] = {}
"""By bytes; kept, because lists of kernels hold their addresses. One product runs at a time."""


def can_split(depth: int) -> bool:
    """Whether this machine multiplies rows of that depth so."""
    return depth % CHUNK == 0 and has_matrix_unit()


def split_arguments(depth: int) -> tuple[int, int, int]:
    """The fields of split_linear_f32 beyond those of linear.py, for as many threads as torch has."""
    num_chunks, threads = depth // CHUNK, torch.get_num_threads()
    bytes_per_thread = _PART_BYTES + 2 * num_chunks * _X_CHUNK_BYTES + (num_chunks + 1) * _W_CHUNK_BYTES + _BLOCK_BYTES
    bytes_per_thread = -(-bytes_per_thread // 4096) * 4096
    num_bytes = 1 << (bytes_per_thread * threads + 63).bit_length()  # few different buffers
    if num_bytes not in _scratch:
        _scratch[num_bytes] = torch.empty(num_bytes, dtype=torch.uint8)
    return _scratch[num_bytes].data_ptr(), bytes_per_thread, TILE_CONFIG.ctypes.data
