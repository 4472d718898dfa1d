"""A kernel whose variants differ in every way that launches can, with its result in plain torch."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["picked"])  # type: ignore[untyped-decorator]
def scaled_rows(x, picked, out, size, stride, factor, WIDTH: tl.constexpr, ADD: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """out[row, i] = factor * x[picked[row] * stride + i] + ADD for the first size columns."""
    row = tl.program_id(0)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    start = tl.load(picked + row).to(tl.int64) * stride
    values = tl.load(x + start + at, mask=at < size, other=0.0).to(tl.float32) * factor + ADD
    tl.store(out + row * size + at, values.to(out.dtype.element_ty), mask=at < size)


def scaled_rows_reference(x: Tensor, picked: Tensor, size: int, stride: int, factor: float, add: int) -> Tensor:
    """What the kernel computes of x, a flat tensor, in float64."""
    rows = torch.stack([x[at * stride : at * stride + size] for at in picked.tolist()])
    return rows.double() * factor + add
