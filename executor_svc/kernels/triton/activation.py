"""activation(gate) * up in one kernel, and the activations that all kernels of this folder know.

Knows tensors; no model.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.triton.launch import Constants, Launch
from executor_svc.kernels.triton.overlap import let_next_start, overlap_on, wait_for_previous

SILU, GELU_TANH = 1, 2
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}
"""Numbers of activations in kernels, by the activation's name."""
_BLOCK, _LARGE_BLOCK = 1024, 2048
"""Columns of a program, for few tokens and for many: few programs leave processors idle, many want more loads on their way."""
_MANY_TOKENS = 512


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """SILU or GELU_TANH of float32 values."""
    if ACTIVATION == 1:
        result = gate * tl.sigmoid(gate)
    else:
        # 0.5 * (1 + tanh(z)) is sigmoid(2 z).
        inner = (gate + 0.044715 * gate * gate * gate) * 1.5957691216057308
        result = gate * tl.sigmoid(inner)
    return result


@Launch
@triton.jit
def _act_mul_kernel(
    gate_up, out, stride, stride_out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_up + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    value = activate(gate, ACTIVATION) * up
    tl.store(out + row * stride_out + column, value.to(out.dtype.element_ty), mask=mask)


def act_mul(gate_up: Tensor, out: Tensor, activation: str, *, overlap: bool | None = None) -> Tensor:
    """Computes activation(first half) * second half into out.

    Args:
        gate_up: [num_tokens, 2 * width], rows may be strided.
        out: [num_tokens, width], rows may be strided, any float dtype.
        activation: a name in ACTIVATIONS.
        overlap: begin before the previous kernel has ended; None: where the device can.

    Returns:
        out.
    """
    num_tokens, width = out.shape
    assert gate_up.shape == (num_tokens, 2 * width) and gate_up.stride(1) == 1 and out.stride(1) == 1
    if num_tokens == 0:
        return out
    overlap = overlap_on(out.device, overlap)
    block = _BLOCK if num_tokens < _MANY_TOKENS else _LARGE_BLOCK
    _act_mul_kernel.launch(
        (num_tokens, triton.cdiv(width, block)),
        _constants(width, block, activation, overlap),
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
    )
    return out


@functools.cache
def _constants(width: int, block: int, activation: str, overlap: bool) -> Constants:
    options = {"launch_pdl": True} if overlap else {}
    return Constants(WIDTH=width, BLOCK=block, ACTIVATION=ACTIVATIONS[activation], OVERLAP=overlap, **options)


def act_mul_reference(gate_up: Tensor, activation: str) -> Tensor:
    """What act_mul computes, in plain torch operations, the dtype of gate_up."""
    gate, up = gate_up.chunk(2, dim=-1)
    function = torch.nn.functional
    return (function.silu(gate) if activation == "silu" else function.gelu(gate, approximate="tanh")) * up
