"""RMS normalisation, compiled. Knows rows of numbers. Does not know models."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor_svc.kernels.cpu.compile import FIRST_ARG, Kernel, kernel, named, num_threads, thread_idx
from executor_svc.kernels.cpu.vector import (
    LANES,
    load_f64,
    load_i64,
    vfma,
    vload,
    vload_first,
    vsplat,
    vstore,
    vstore_first,
    vsum,
)

# Fields of the arguments, from FIRST_ARG on; strides are in bytes.
(_X, _X_STRIDE, _OUT, _WEIGHT, _NUM_ROWS, _WIDTH, _EPSILON) = range(FIRST_ARG, FIRST_ARG + 7)
_SERIAL_ELEMENTS = 16384
"""Up to so many numbers one thread is faster than waking the others."""


def _make(dtype: str, itemsize: int) -> Any:
    """The kernel's body for rows of one dtype; the weight is float32."""

    @named(dtype)
    def run(args):  # type: ignore[no-untyped-def]
        width, num_rows, weight = load_i64(args, _WIDTH), load_i64(args, _NUM_ROWS), load_i64(args, _WEIGHT)
        thread, threads = thread_idx(args), num_threads(args)
        full = width // LANES * LANES
        for row in range(num_rows * thread // threads, num_rows * (thread + 1) // threads):
            x = load_i64(args, _X) + row * load_i64(args, _X_STRIDE)
            out = load_i64(args, _OUT) + row * width * itemsize
            squares = vsplat(np.float32(0.0))
            for i in range(0, full, LANES):
                value = vload(x + i * itemsize, dtype)
                squares = vfma(value, value, squares)
            if full < width:
                value = vload_first(x + full * itemsize, width - full, dtype)
                squares = vfma(value, value, squares)
            mean = vsum(squares) / np.float32(width)
            factor = vsplat(np.float32(np.float32(1.0) / np.sqrt(np.float32(mean + load_f64(args, _EPSILON)))))
            for i in range(0, full, LANES):
                value = vload(x + i * itemsize, dtype) * factor * vload(weight + 4 * i, "f32")
                vstore(out + i * itemsize, value, dtype)
            if full < width:
                n = width - full
                value = vload_first(x + full * itemsize, n, dtype) * factor * vload_first(weight + 4 * full, n, "f32")
                vstore_first(out + full * itemsize, value, n, dtype)

    return run


_run_f32, _run_bf16 = _make("f32", 4), _make("bf16", 2)


@kernel("6qd")
def rms_norm_f32(args: int) -> None:
    """Normalises rows of float32."""
    _run_f32(args)


@kernel("6qd")
def rms_norm_bf16(args: int) -> None:
    """Normalises rows of bfloat16, computed in float32."""
    _run_bf16(args)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Each row divided by the root of its mean square, times weight.

    Args:
        x: float32 or bfloat16 [num_rows, width], the last dimension contiguous.
        weight: float32 [width].
        epsilon: added to the mean square.

    Returns:
        [num_rows, width], the dtype of x.
    """
    out = x.new_empty(x.shape)
    run, fields = rms_norm_arguments(x, weight, epsilon, out)
    run(*fields, threads=1 if x.numel() <= _SERIAL_ELEMENTS else torch.get_num_threads())
    return out


def rms_norm_arguments(x: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> tuple[Kernel, tuple[float, ...]]:
    """The kernel of rms_norm and its fields, for callers that run several kernels at once; out is contiguous."""
    run = rms_norm_f32 if x.dtype == torch.float32 else rms_norm_bf16
    return run, (x.data_ptr(), x.stride(0) * x.itemsize, out.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], epsilon)
