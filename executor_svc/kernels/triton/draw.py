"""Draws tokens from logits: temperature, top-k, top-p, min-p, one program per row, no sorting.

Knows tensors. Means what core/sampling_draw.py means: filters keep whole ties, and the draw goes through tokens by id. Scaled
logits are at most 0, so that the bits of their magnitudes are ordered as they are: the smallest logit that a filter keeps is
found bit by bit. That reads the likely tokens only, from registers, unless those do not decide it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.triton.launch import Launch

_LIKELY = 10.0
_BLOCK = 4096
_CANDIDATES = 8192


@triton.jit
def _scaled(row_ptr, best, temperature, start, size: tl.constexpr, BLOCK: tl.constexpr):
    """Magnitudes of BLOCK scaled logits from start on; infinite beyond the row and where a logit is."""
    at = start + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + at, mask=at < size, other=float("-inf")).to(tl.float32)
    return (best - logits) / temperature


@triton.jit
def _bits(magnitude):
    return magnitude.to(tl.int32, bitcast=True)


@triton.jit
def _below(row_ptr, best, temperature, bound, limit, WEIGHTS: tl.constexpr, size: tl.constexpr, BLOCK: tl.constexpr):
    """Number, or sum of weights, of the row's tokens whose bits are less than bound and at most limit."""
    total = 0.0
    for start in range(0, size, BLOCK):
        magnitude = _scaled(row_ptr, best, temperature, start, size, BLOCK)
        inside = (_bits(magnitude) < bound) & (_bits(magnitude) <= limit)
        total += tl.sum(tl.where(inside, tl.exp(-magnitude) if WEIGHTS else 1.0, 0.0), 0)
    return total


@Launch
@triton.jit
def _draw_kernel(
    logits, scratch, temperatures, top_ps, min_ps, top_ks, uniforms, out, stride, likely,
    size: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    drawn = tl.zeros((), tl.int32)
    if temperature > 0:
        row_ptr = logits + row * stride
        best = tl.full((), float("-inf"), tl.float32)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            values = tl.load(row_ptr + at, mask=at < size, other=float("-inf")).to(tl.float32)
            best = tl.maximum(best, tl.max(values, 0))
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        min_p = tl.load(min_ps + row)
        limit = tl.full((), 0x7F7FFFFF, tl.int32)  # the largest finite magnitude: weights beyond it are 0
        if top_k >= size:
            top_k = 0
        if (top_k > 0) | (top_p < 1):
            # The likely tokens side by side, and the weight of all.
            count = tl.zeros((), tl.int32)
            mass = 0.0
            scratch_ptr = scratch + row * CANDIDATES
            for start in range(0, size, BLOCK):
                magnitude = _scaled(row_ptr, best, temperature, start, size, BLOCK)
                is_likely = magnitude <= likely
                place = count + tl.cumsum(is_likely.to(tl.int32), 0) - 1
                tl.store(scratch_ptr + place, magnitude, mask=is_likely & (place < CANDIDATES))
                count += tl.sum(is_likely.to(tl.int32), 0)
                mass += tl.sum(tl.exp(-magnitude), 0)
            tl.debug_barrier()
            index = tl.arange(0, CANDIDATES)
            candidates = tl.load(scratch_ptr + index, mask=index < count, other=float("inf"))
            bits = _bits(candidates)
            weights = tl.exp(-candidates)
            fits = count <= CANDIDATES
            if top_k > 0:
                # The k-th smallest magnitude is the largest bound with fewer than k below it.
                found = tl.zeros((), tl.int32)
                for step in range(31):
                    bound = found | (1 << (30 - step))
                    if fits & (top_k <= count):
                        below = tl.sum((bits < bound).to(tl.float32), 0)
                    else:
                        below = _below(row_ptr, best, temperature, bound, limit, False, size, BLOCK)
                    found = tl.where(below < top_k, bound, found)
                limit = tl.minimum(limit, found)
                if fits & (top_k <= count):
                    mass = tl.sum(tl.where(bits <= limit, weights, 0.0), 0)
                else:
                    mass = _below(row_ptr, best, temperature, 0x7FFFFFFF, limit, True, size, BLOCK)
            if top_p < 1:
                wanted = mass * top_p
                reached = tl.sum(tl.where(bits <= limit, weights, 0.0), 0)
                found = tl.zeros((), tl.int32)
                for step in range(31):
                    bound = found | (1 << (30 - step))
                    if fits & (reached >= wanted):
                        below = tl.sum(tl.where((bits < bound) & (bits <= limit), weights, 0.0), 0)
                    else:
                        below = _below(row_ptr, best, temperature, bound, limit, True, size, BLOCK)
                    found = tl.where(below < wanted, bound, found)
                limit = tl.minimum(limit, found)
        if min_p > 0:
            limit = tl.minimum(limit, _bits(tl.maximum(-tl.log(min_p), 0.0)))
        total = tl.zeros((), tl.float64)
        for start in range(0, size, BLOCK):
            magnitude = _scaled(row_ptr, best, temperature, start, size, BLOCK)
            weight = tl.where(_bits(magnitude) <= limit, tl.exp(-magnitude), 0.0)
            total += tl.sum(weight.to(tl.float64), 0)
        target = tl.load(uniforms + row) * total
        before = tl.zeros((), tl.float64)
        drawn = tl.full((), 0x7FFFFFFF, tl.int32)
        last = tl.zeros((), tl.int32)
        for start in range(0, size, BLOCK):
            magnitude = _scaled(row_ptr, best, temperature, start, size, BLOCK)
            weight = tl.where(_bits(magnitude) <= limit, tl.exp(-magnitude), 0.0).to(tl.float64)
            cumulative = before + tl.cumsum(weight, 0)
            at = start + tl.arange(0, BLOCK)
            is_kept = weight > 0
            drawn = tl.minimum(drawn, tl.min(tl.where(is_kept & (cumulative > target), at, 0x7FFFFFFF), 0))
            last = tl.maximum(last, tl.max(tl.where(is_kept, at, 0), 0))
            before += tl.sum(weight, 0)
        drawn = tl.minimum(drawn, last)  # where rounding carries the number to the very end
    tl.store(out + row, drawn.to(tl.int64))


def draw(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    uniform: Tensor,
    *,
    block: int = _BLOCK,
    candidates: int = _CANDIDATES,
    likely: float = _LIKELY,
) -> Tensor:
    """One token per row.

    Args:
        logits: [num_rows, vocab_size], the last dimension contiguous.
        temperature: float32 [num_rows]; rows of 0 are not drawn.
        top_p: float32 [num_rows]; 1: all.
        min_p: float32 [num_rows]; 0: all.
        top_k: int32 [num_rows]; 0: all.
        uniform: float64 [num_rows], in [0, 1).
        block: logits that are read at once, a power of 2.
        candidates: likely tokens that are kept in registers, a power of 2.
        likely: scaled logits within this distance of the best are.

    Returns:
        int64 [num_rows]; 0 where nothing is drawn, any id where the largest logit is not a finite number.
    """
    num_rows, size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    scratch = torch.empty(num_rows, candidates, dtype=torch.float32, device=logits.device)
    if num_rows:
        _draw_kernel(
            (num_rows,),
            logits, scratch, temperature, top_p, min_p, top_k, uniform, out, logits.stride(0), likely,
            size=size, BLOCK=block, CANDIDATES=candidates, num_warps=8,
        )  # fmt: skip
    return out
