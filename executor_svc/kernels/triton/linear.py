"""Products of a few rows with a large weight, as fast as the weight can be read.

Knows tensors. Does not know models, or which configuration is best for a shape (linear_configs.py).

    out[m, n] = epilogue(sum over k of x[m, k] * weight[n, k])        x [M <= 128, K], weight [N, K], sums in float32

Two kernels read each byte of the weight once, with many loads on their way at any time:
    reduce   up to 4 rows, no tensor cores: lanes multiply 8 weights at a time, and are added up at the end of a row
    tensor   any number of rows, padded to a power of two from 8 on; a tile of the weight is the first operand, so the weight's
             rows, not x's, fill the tensor cores. K may be split: the parts go through scratch, and the program that comes
             last adds them up in a fixed order, within the same launch

Epilogues: bias; activation(gate) * up of a weight whose first half of rows are gates. Norms of x and the sum with the residual
stream stay a kernel of their own: every program of a product would repeat them, which was measured to cost more than the launch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.triton.activation import ACTIVATIONS, activate
from executor_svc.kernels.triton.launch import Launch
from executor_svc.kernels.triton.overlap import fetch_rows, let_next_start, overlap_on, wait_for_previous

MAX_REDUCE_ROWS = 4
MAX_ROWS = 128


@dataclass(frozen=True)
class StreamConfig:
    """How a product is cut up.

    Attributes:
        block_n, block_k: rows and columns of the weight that a program holds at a time, powers of two. With gates, block_n counts
            gates and their partners in the tensor kernel, gates alone in the other.
        num_warps, num_stages: of Triton.
        split_k: programs that share the rows of a tile (tensor kernel).
        fetch_k: columns that a program brings into the second-level cache while the kernel before still runs, a power of two.
        ahead: the next kernel may be launched when so many steps along K are left (tensor kernel; the other one says so at its
            start, for its programs are short). Too early, and its fetches are over when the memory falls idle.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    split_k: int = 1
    fetch_k: int = 0
    ahead: int = 4


class StreamWorkspace:
    """Scratch of split products; good for any number of calls that follow each other on one stream.

    Attributes:
        partial: float32, parts of sums.
        arrivals: int32, programs that have finished a tile; zero between calls.
    """

    def __init__(self, num_partials: int, num_tiles: int, device: torch.device):
        self.partial = torch.empty(num_partials, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(num_tiles, dtype=torch.int32, device=device)

    @staticmethod
    def for_device(device: torch.device) -> "StreamWorkspace":
        """Large enough for every configuration that linear_configs.py gives out."""
        return StreamWorkspace(1 << 22, 1 << 14, device)

    def fits(self, config: StreamConfig, tiles: int, block_m: int) -> bool:
        """Whether a product of so many tiles has room here."""
        parts = tiles * config.split_k * config.block_n * block_m
        return config.split_k == 1 or (tiles <= self.arrivals.shape[0] and parts <= self.partial.shape[0])


def stream_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    config: StreamConfig,
    workspace: StreamWorkspace,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    reduce: bool = False,
    overlap: bool | None = None,
) -> Tensor:
    """Computes the product into out.

    Args:
        x: [M, K], M up to MAX_ROWS, rows may be strided, of the weight's dtype.
        weight: [N, K], contiguous.
        out: [M, N], with activation [M, N / 2]; any float dtype, rows may be strided.
        config: how.
        workspace: scratch of split products.
        bias: [N], or None.
        activation: a name in ACTIVATIONS: out is activation(first half) * second half.
        reduce: use the kernel without tensor cores; M up to MAX_REDUCE_ROWS.
        overlap: begin before the previous kernel has ended; None: where the device can.

    Returns:
        out.
    """
    num_rows, depth = x.shape
    num_outputs = weight.shape[0] // (1 if activation is None else 2)
    assert weight.is_contiguous() and weight.shape[1] == depth and out.shape == (num_rows, num_outputs)
    assert x.dtype == weight.dtype and x.stride(1) == 1 and out.stride(1) == 1 and num_rows <= MAX_ROWS
    overlap = overlap_on(x.device, overlap)
    width = config.block_n if activation is None or reduce else config.block_n // 2
    tiles = triton.cdiv(num_outputs, width)
    fetch_k = _fetch_k(weight, config, width, num_outputs) if overlap else 0
    shared = {
        "N": num_outputs,
        "K": depth,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
        "ACTIVATION": 0 if activation is None else ACTIVATIONS[activation],
        "HAS_BIAS": bias is not None,
        "FETCH_K": fetch_k,
        "OVERLAP": overlap,
        "THREADS": 32 * config.num_warps,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if overlap:
        shared["launch_pdl"] = True
    if reduce:
        assert num_rows <= MAX_REDUCE_ROWS and config.split_k == 1
        _reduce_kernel(
            (tiles,),
            x,
            weight,
            weight if bias is None else bias,
            out,
            x.stride(0),
            out.stride(0),
            M=num_rows,
            **shared,
        )
        return out
    block_m = padded_rows(num_rows)
    assert workspace.fits(config, tiles, block_m)
    _tensor_kernel(
        (tiles * config.split_k,),
        x,
        weight,
        weight if bias is None else bias,
        out,
        workspace.partial,
        workspace.arrivals,
        num_rows,
        x.stride(0),
        out.stride(0),
        BLOCK_M=block_m,
        SPLIT_K=config.split_k,
        AHEAD=config.ahead,
        **shared,
    )
    return out


def _fetch_k(weight: Tensor, config: StreamConfig, width: int, num_outputs: int) -> int:
    """Columns to fetch early: config.fetch_k, as far as every thread asks for 16 bytes or more and nothing but the weight."""
    depth, itemsize = weight.shape[1], weight.element_size()
    part = depth // config.split_k
    columns = min(config.fetch_k, 1 << (part.bit_length() - 1)) if part else 0
    is_aligned = depth * itemsize % 16 == 0 and weight.data_ptr() % 16 == 0
    is_even = depth % (config.block_k * config.split_k) == 0 or config.split_k == 1
    is_enough = columns * itemsize * width >= 16 * 32 * config.num_warps
    return columns if is_aligned and is_even and is_enough and num_outputs % width == 0 else 0


def padded_rows(num_rows: int) -> int:
    """Rows that the tensor kernel computes for num_rows."""
    return max(8, int(triton.next_power_of_2(num_rows)))


@triton.jit
def _load_tile(weight, row, column, valid, K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Rows and columns of the weight; zeros for rows that are not valid and for columns beyond its end."""
    address = weight + row.to(tl.int64)[:, None] * K + column[None, :]
    if EVEN_K:
        if EVEN_N:
            tile = tl.load(address, eviction_policy="evict_first")
        else:
            tile = tl.load(address, mask=valid[:, None], other=0.0, eviction_policy="evict_first")
    else:
        tile = tl.load(address, mask=valid[:, None] & (column[None, :] < K), other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _fetch_first(weight, row, column, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, FETCH_K: tl.constexpr,
                 ACTIVATION: tl.constexpr, THREADS: tl.constexpr):  # fmt: skip
    """Brings the columns from column on of BLOCK_N rows from row on into the second-level cache; gates' partners too."""
    if FETCH_K > 0:
        itemsize: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        first = weight.to(tl.int64) + (row.to(tl.int64) * K + column) * itemsize
        fetch_rows(first, K * itemsize, BLOCK_N, FETCH_K * itemsize, THREADS)
        if ACTIVATION != 0:
            partner: tl.constexpr = N * K * itemsize
            fetch_rows(first + partner, K * itemsize, BLOCK_N, FETCH_K * itemsize, THREADS)


@triton.jit
def _add_row(x, k, w, u, acc, up, K: tl.constexpr, ACTIVATION: tl.constexpr):
    """One row of x times a tile, lane by lane, onto the sums so far."""
    row = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    acc += w * row[None, :]
    if ACTIVATION != 0:
        up += u * row[None, :]
    return acc, up


@triton.jit
def _finish_row(out, n, acc, up, bias, N: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Adds up the lanes of one row of out, and stores it after the epilogue."""
    total = tl.sum(acc, 1)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if ACTIVATION != 0:
        partner = tl.sum(up, 1)
        if HAS_BIAS:
            partner += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
        total = activate(total, ACTIVATION) * partner
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < N)


@Launch
@triton.jit
def _reduce_kernel(
    x, weight, bias, out, stride_x, stride_out,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    FETCH_K: tl.constexpr, OVERLAP: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    first = tl.program_id(0) * BLOCK_N
    _fetch_first(weight, first, 0, N, K, BLOCK_N, FETCH_K, ACTIVATION, THREADS)
    wait_for_previous(OVERLAP)
    n = first + tl.arange(0, BLOCK_N)
    acc0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc1, acc2, acc3, up0, up1, up2, up3 = acc0, acc0, acc0, acc0, acc0, acc0, acc0
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        w = _load_tile(weight, n, k, n < N, K, N % BLOCK_N == 0, K % BLOCK_K == 0).to(tl.float32)
        u = w
        if ACTIVATION != 0:
            u = _load_tile(weight, N + n, k, n < N, K, N % BLOCK_N == 0, K % BLOCK_K == 0).to(tl.float32)
        acc0, up0 = _add_row(x, k, w, u, acc0, up0, K, ACTIVATION)
        if M > 1:
            acc1, up1 = _add_row(x + stride_x, k, w, u, acc1, up1, K, ACTIVATION)
        if M > 2:
            acc2, up2 = _add_row(x + 2 * stride_x, k, w, u, acc2, up2, K, ACTIVATION)
        if M > 3:
            acc3, up3 = _add_row(x + 3 * stride_x, k, w, u, acc3, up3, K, ACTIVATION)
    _finish_row(out, n, acc0, up0, bias, N, ACTIVATION, HAS_BIAS)
    if M > 1:
        _finish_row(out + stride_out, n, acc1, up1, bias, N, ACTIVATION, HAS_BIAS)
    if M > 2:
        _finish_row(out + 2 * stride_out, n, acc2, up2, bias, N, ACTIVATION, HAS_BIAS)
    if M > 3:
        _finish_row(out + 3 * stride_out, n, acc3, up3, bias, N, ACTIVATION, HAS_BIAS)


@triton.jit
def _finish_tile(
    out, m, first, acc, bias, num_rows, stride_out, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Stores a tile [BLOCK_N, BLOCK_M] of sums, transposed, after the epilogue; first: its first column of out."""
    WIDTH: tl.constexpr = BLOCK_N if ACTIVATION == 0 else BLOCK_N // 2
    if HAS_BIAS:
        i = tl.arange(0, BLOCK_N)
        n = first + i % WIDTH
        acc += tl.load(bias + n + i // WIDTH * N, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION != 0:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, WIDTH, BLOCK_M)), (1, 2, 0)))
        acc = activate(gate, ACTIVATION) * up
    n = first + tl.arange(0, WIDTH)
    address = out + m[:, None] * stride_out + n[None, :]
    mask = (m[:, None] < num_rows) & (n[None, :] < N)
    tl.store(address, tl.trans(acc).to(out.dtype.element_ty), mask=mask)


# Batches of any size share a kernel: none is compiled in the middle of serving.
@Launch
@triton.jit(do_not_specialize=["num_rows"])
def _tensor_kernel(
    x, weight, bias, out, partial, arrivals, num_rows, stride_x, stride_out,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, FETCH_K: tl.constexpr, OVERLAP: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    # With gates, a tile is half gates and half their partners.
    WIDTH: tl.constexpr = BLOCK_N if ACTIVATION == 0 else BLOCK_N // 2
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    EVEN_K: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    tile, part = tl.program_id(0) // SPLIT_K, tl.program_id(0) % SPLIT_K
    first, first_k = tile * WIDTH, part * (STEPS * BLOCK_K)
    if STEPS <= AHEAD:
        let_next_start(OVERLAP)
    _fetch_first(weight, first, first_k, N, K, WIDTH, FETCH_K, ACTIVATION, THREADS)
    wait_for_previous(OVERLAP)
    i = tl.arange(0, BLOCK_N)
    n = first + i % WIDTH
    m = tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        if STEPS > AHEAD:  # noqa: SIM102 (known when compiled, and not)
            if step == STEPS - AHEAD:
                let_next_start(OVERLAP)
        k = first_k + step * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = m[:, None] < num_rows
        if not EVEN_K:
            mask = mask & (k[None, :] < K)
        rows = tl.trans(tl.load(x + m[:, None] * stride_x + k[None, :], mask=mask, other=0.0))
        w = _load_tile(weight, n + i // WIDTH * N, k, n < N, K, N % WIDTH == 0, EVEN_K)
        acc = tl.dot(w, rows, acc, input_precision="ieee")
    if SPLIT_K == 1:
        _finish_tile(out, m, first, acc, bias, num_rows, stride_out, N, BLOCK_N, BLOCK_M, ACTIVATION, HAS_BIAS)
    else:
        inside = i[:, None] * BLOCK_M + m[None, :]
        tl.store(partial + (tile * SPLIT_K + part) * (BLOCK_N * BLOCK_M) + inside, acc)
        # One thread counts the program in, after all of its threads have stored.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(SPLIT_K):
                acc += tl.load(partial + (tile * SPLIT_K + other) * (BLOCK_N * BLOCK_M) + inside, cache_modifier=".cg")
            _finish_tile(out, m, first, acc, bias, num_rows, stride_out, N, BLOCK_N, BLOCK_M, ACTIVATION, HAS_BIAS)
            tl.store(arrivals + tile, 0)
