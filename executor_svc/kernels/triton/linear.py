"""Products of a few rows with a large weight, as fast as the weight can be read.

Knows tensors. Does not know models, or which configuration is best for a shape (linear_configs.py).

    out[m, n] = epilogue(sum over k of x[m, k] * weight[n, k])        x [M <= 64, K], weight [N, K], sums in float32

Two kernels read each byte of the weight once, with many loads on their way at any time:
    reduce   up to 4 rows, no tensor cores: lanes multiply 8 weights at a time, and are added up at the end of a row
    tensor   any number of rows, padded to 8, 16, 32 or 64; a tile of the weight is the first operand, so the weight's rows,
             not x's, fill the tensor cores. K may be split: the parts go through scratch, and the program that comes last
             adds them up in a fixed order, within the same launch

Epilogues: bias; activation(gate) * up of a weight whose first half of rows are gates; added to what out holds. The reduce kernel
can also normalise x on its way (RMS norm), so that a layer needs no launch for it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.triton.activation import ACTIVATIONS, activate
from executor_svc.kernels.triton.overlap import can_overlap, fetch_rows, let_next_start, wait_for_previous

MAX_REDUCE_ROWS = 4
MAX_ROWS = 64


@dataclass(frozen=True)
class StreamConfig:
    """How a product is cut up.

    Attributes:
        block_n, block_k: rows and columns of the weight that a program holds at a time, powers of two; with gates twice as many.
        num_warps, num_stages: of Triton.
        split_k: programs that share the rows of a tile (tensor kernel).
        fetch_k: columns that a program brings into the second-level cache while the kernel before still runs, a power of two.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    split_k: int = 1
    fetch_k: int = 0


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

    def fits(self, config: StreamConfig, block_m: int, num_outputs: int, is_gated: bool) -> bool:
        """Whether a product of num_outputs columns has room here."""
        tiles = triton.cdiv(num_outputs, config.block_n)
        parts = tiles * config.split_k * config.block_n * block_m * (2 if is_gated else 1)
        return config.split_k == 1 or (tiles <= self.arrivals.shape[0] and parts <= self.partial.shape[0])


@dataclass(frozen=True)
class Norm:
    """RMS norm of a product's input: x * rsqrt(mean(x^2) + epsilon) * weight."""

    weight: Tensor
    epsilon: float


def stream_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    config: StreamConfig,
    workspace: StreamWorkspace,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    add: bool = False,
    norm: Norm | None = None,
    reduce: bool = False,
) -> Tensor:
    """Computes the product into out.

    Args:
        x: [M, K], M up to MAX_ROWS, rows may be strided; of the weight's dtype unless reduce is set.
        weight: [N, K], contiguous.
        out: [M, N], with activation [M, N / 2]; any float dtype, rows may be strided.
        config: how.
        workspace: scratch of split products.
        bias: [N], or None.
        activation: a name in ACTIVATIONS: out is activation(first half) * second half.
        add: the result is added to what out holds.
        norm: applied to x first; with reduce only.
        reduce: use the kernel without tensor cores; M up to MAX_REDUCE_ROWS.

    Returns:
        out.
    """
    num_rows, depth = x.shape
    num_outputs = weight.shape[0] // (1 if activation is None else 2)
    assert weight.is_contiguous() and weight.shape[1] == depth and out.shape == (num_rows, num_outputs)
    assert x.stride(1) == 1 and out.stride(1) == 1 and num_rows <= MAX_ROWS
    overlap = can_overlap(x.device)
    tiles = triton.cdiv(num_outputs, config.block_n)
    # Rows are fetched in parts of at least 16 bytes for every thread.
    fetch_k = min(config.fetch_k, _power_of_two_below(depth // config.split_k)) if overlap else 0
    if fetch_k * weight.element_size() * config.block_n < 16 * 32 * config.num_warps or num_outputs % config.block_n:
        fetch_k = 0
    shared = {
        "N": num_outputs,
        "K": depth,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
        "ACTIVATION": 0 if activation is None else ACTIVATIONS[activation],
        "HAS_BIAS": bias is not None,
        "ADD": add,
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
        _reduce_kernel[(tiles,)](
            x,
            weight,
            weight if bias is None else bias,
            x if norm is None else norm.weight,
            out,
            x.stride(0),
            out.stride(0),
            0.0 if norm is None else norm.epsilon,
            M=num_rows,
            HAS_NORM=norm is not None,
            **shared,
        )
        return out
    assert norm is None and x.dtype == weight.dtype
    block_m = padded_rows(num_rows)
    assert workspace.fits(config, block_m, num_outputs, activation is not None)
    _tensor_kernel[(tiles * config.split_k,)](
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
        **shared,
    )
    return out


def padded_rows(num_rows: int) -> int:
    """Rows that the tensor kernel computes for num_rows."""
    return max(8, triton.next_power_of_2(num_rows))


def _power_of_two_below(value: int) -> int:
    return 1 << (value.bit_length() - 1) if value > 0 else 0


@triton.jit
def _sums(w, x, BLOCK_N: tl.constexpr):  # noqa: N803
    """Adds nothing yet: one row of x times a tile of the weight, lane by lane."""
    return w * x[None, :]


@triton.jit
def _store_row(out, n, n_mask, total, up, bias, N: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr):  # noqa: N803, E501
    """The epilogue of one row of out; total and up are [BLOCK_N]."""
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)
        if ACTIVATION != 0:
            up += tl.load(bias + N + n, mask=n_mask, other=0.0).to(tl.float32)
    if ACTIVATION != 0:
        total = activate(total, ACTIVATION) * up
    if ADD:
        total += tl.load(out + n, mask=n_mask, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n_mask)


@triton.jit
def _reduce_kernel(
    x, weight, bias, norm_weight, out, stride_x, stride_out, epsilon,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, HAS_NORM: tl.constexpr,
    FETCH_K: tl.constexpr, OVERLAP: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip  # noqa: N803
    let_next_start(OVERLAP)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = n.to(tl.int64) * K
    if FETCH_K > 0:
        itemsize: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        first = weight.to(tl.int64) + tl.program_id(0).to(tl.int64) * (BLOCK_N * K * itemsize)
        fetch_rows(first, K * itemsize, BLOCK_N, FETCH_K * itemsize, THREADS)
        if ACTIVATION != 0:
            fetch_rows(first + N * K * itemsize, K * itemsize, BLOCK_N, FETCH_K * itemsize, THREADS)
    wait_for_previous(OVERLAP)
    n_mask = n < N
    acc0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    up0, up1, up2, up3 = acc0, acc0, acc0, acc0
    square0 = tl.zeros([BLOCK_K], tl.float32)
    square1, square2, square3 = square0, square0, square0
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        k_mask = k < K
        mask = k_mask[None, :] & n_mask[:, None]
        if K % BLOCK_K == 0:
            if N % BLOCK_N == 0:
                w = tl.load(weight + rows[:, None] + k[None, :], eviction_policy="evict_first").to(tl.float32)
            else:
                w = tl.load(weight + rows[:, None] + k[None, :], mask=n_mask[:, None], other=0.0).to(tl.float32)
        else:
            w = tl.load(weight + rows[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
        u = w
        if ACTIVATION != 0:
            if K % BLOCK_K == 0:
                if N % BLOCK_N == 0:
                    u = tl.load(weight + N * K + rows[:, None] + k[None, :], eviction_policy="evict_first").to(tl.float32)
                else:
                    u = tl.load(weight + N * K + rows[:, None] + k[None, :], mask=n_mask[:, None], other=0.0).to(tl.float32)
            else:
                u = tl.load(weight + N * K + rows[:, None] + k[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.zeros([BLOCK_K], tl.float32)
        if HAS_NORM:
            g = tl.load(norm_weight + k, mask=k_mask, other=0.0).to(tl.float32)
        x0 = tl.load(x + k, mask=k_mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            square0 += x0 * x0
            x0 *= g
        acc0 += w * x0[None, :]
        if ACTIVATION != 0:
            up0 += u * x0[None, :]
        if M > 1:
            x1 = tl.load(x + stride_x + k, mask=k_mask, other=0.0).to(tl.float32)
            if HAS_NORM:
                square1 += x1 * x1
                x1 *= g
            acc1 += w * x1[None, :]
            if ACTIVATION != 0:
                up1 += u * x1[None, :]
        if M > 2:
            x2 = tl.load(x + 2 * stride_x + k, mask=k_mask, other=0.0).to(tl.float32)
            if HAS_NORM:
                square2 += x2 * x2
                x2 *= g
            acc2 += w * x2[None, :]
            if ACTIVATION != 0:
                up2 += u * x2[None, :]
        if M > 3:
            x3 = tl.load(x + 3 * stride_x + k, mask=k_mask, other=0.0).to(tl.float32)
            if HAS_NORM:
                square3 += x3 * x3
                x3 *= g
            acc3 += w * x3[None, :]
            if ACTIVATION != 0:
                up3 += u * x3[None, :]
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(square0, 0) / K + epsilon)
    total, up = tl.sum(acc0, 1) * scale, tl.sum(up0, 1) * scale
    _store_row(out, n, n_mask, total, up, bias, N, ACTIVATION, HAS_BIAS, ADD)
    if M > 1:
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(square1, 0) / K + epsilon)
        total, up = tl.sum(acc1, 1) * scale, tl.sum(up1, 1) * scale
        _store_row(out + stride_out, n, n_mask, total, up, bias, N, ACTIVATION, HAS_BIAS, ADD)
    if M > 2:
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(square2, 0) / K + epsilon)
        total, up = tl.sum(acc2, 1) * scale, tl.sum(up2, 1) * scale
        _store_row(out + 2 * stride_out, n, n_mask, total, up, bias, N, ACTIVATION, HAS_BIAS, ADD)
    if M > 3:
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(square3, 0) / K + epsilon)
        total, up = tl.sum(acc3, 1) * scale, tl.sum(up3, 1) * scale
        _store_row(out + 3 * stride_out, n, n_mask, total, up, bias, N, ACTIVATION, HAS_BIAS, ADD)
