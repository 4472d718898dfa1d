"""RMS normalisation, with what stands before it in a layer: the residual's sum, and another norm of Gemma's kind.

Knows tensors; no model. Sums are float32, whatever the tensors are. Weights are given as they multiply: a family that stores
w and means 1 + w (Gemma) passes offset=1.

    rms_norm            out = norm(x) * weight
    add_rms_norm        residual += x;                  out = norm(residual) * weight
    sandwich_rms_norm   residual += norm(x) * post;     out = norm(residual) * weight

With rows, only those are computed, into as many rows of out, and the residual stream stays as it is.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.triton.launch import Constants, Launch
from executor_svc.kernels.triton.overlap import let_next_start, overlap_on, wait_for_previous


# Rows are picked by slices that begin anywhere.
@Launch
@triton.jit(do_not_specialize_on_alignment=["rows"])
def _rms_norm_kernel(
    x, residual, post_weight, weight, rows, out, stride_x, stride_residual, stride_out, epsilon, offset,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_POST: tl.constexpr,
    HAS_ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    out_row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + offset
    wait_for_previous(OVERLAP)
    row = out_row
    if HAS_ROWS:
        row = tl.load(rows + out_row).to(tl.int64)
    value = tl.load(x + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_POST:
        post = tl.load(post_weight + column, mask=mask, other=0.0).to(tl.float32) + offset
        value = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + epsilon) * post
    if HAS_RESIDUAL:
        address = residual + row * stride_residual + column
        value += tl.load(address, mask=mask, other=0.0).to(tl.float32)
        if not HAS_ROWS:
            tl.store(address, value.to(residual.dtype.element_ty), mask=mask)
    result = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + epsilon) * scale
    tl.store(out + out_row * stride_out + column, result.to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    out: Tensor,
    *,
    offset: float = 0.0,
    rows: Tensor | None = None,
    overlap: bool | None = None,
) -> Tensor:
    """Normalises rows.

    Args:
        x: [num_tokens, width], rows may be strided, any float dtype.
        weight: [width], any float dtype.
        epsilon: added to the mean square.
        out: [num_tokens, width], with rows [num_rows, width]; rows may be strided, any float dtype; may be x.
        offset: added to the weight.
        rows: int64 [num_rows], which rows of x to normalise; None: all.
        overlap: begin before the previous kernel has ended; None: where the device can.

    Returns:
        out.
    """
    return _run(x, None, None, weight, epsilon, out, offset, rows, overlap)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    out: Tensor,
    *,
    offset: float = 0.0,
    rows: Tensor | None = None,
    overlap: bool | None = None,
) -> Tensor:
    """Adds x to the residual stream [num_tokens, width] in place, then normalises that into out; see rms_norm."""
    return _run(x, residual, None, weight, epsilon, out, offset, rows, overlap)


def sandwich_rms_norm(
    x: Tensor,
    residual: Tensor,
    post_weight: Tensor,
    weight: Tensor,
    epsilon: float,
    out: Tensor,
    *,
    offset: float = 0.0,
    rows: Tensor | None = None,
    overlap: bool | None = None,
) -> Tensor:
    """Adds norm(x) * post_weight to the residual stream in place, then normalises that into out; see rms_norm."""
    return _run(x, residual, post_weight, weight, epsilon, out, offset, rows, overlap)


def _run(
    x: Tensor,
    residual: Tensor | None,
    post_weight: Tensor | None,
    weight: Tensor,
    epsilon: float,
    out: Tensor,
    offset: float,
    rows: Tensor | None,
    overlap: bool | None,
) -> Tensor:
    num_rows, width = out.shape
    assert x.shape == (num_rows if rows is None else x.shape[0], width) and weight.shape == (width,)
    assert x.stride(1) == 1 and out.stride(1) == 1 and (rows is None or rows.shape == (num_rows,))
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1)
    if num_rows == 0:
        return out
    overlap = overlap_on(x.device, overlap)
    target = out if residual is None else residual
    _rms_norm_kernel.launch(
        (num_rows,),
        _constants(width, residual is not None, post_weight is not None, rows is not None, overlap),
        x,
        target,
        weight if post_weight is None else post_weight,
        weight,
        x if rows is None else rows,
        out,
        x.stride(0),
        target.stride(0),
        out.stride(0),
        epsilon,
        offset,
    )
    return out


@functools.cache
def _constants(width: int, has_residual: bool, has_post: bool, has_rows: bool, overlap: bool) -> Constants:
    block = triton.next_power_of_2(width)
    return Constants(
        WIDTH=width,
        BLOCK=block,
        HAS_RESIDUAL=has_residual,
        HAS_POST=has_post,
        HAS_ROWS=has_rows,
        OVERLAP=overlap,
        num_warps=min(max(block // 512, 1), 16),
        **({"launch_pdl": True} if overlap else {}),
    )


def rms_norm_reference(x: Tensor, weight: Tensor, epsilon: float, *, offset: float = 0.0) -> Tensor:
    """What rms_norm computes, in plain torch operations and the dtype of x (float64 for a reference)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * (weight.to(x.dtype) + offset)
