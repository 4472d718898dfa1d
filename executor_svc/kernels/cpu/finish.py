"""What happens to a bfloat16 product on its way into float32 rows, compiled: torch needs two or three passes.

Knows rows of numbers and the modes of linear.py. Does not know weights.
"""

import torch
from torch import Tensor

from executor_svc.kernels.cpu.compile import FIRST_ARG, kernel, num_threads, thread_idx
from executor_svc.kernels.cpu.linear import ADD, SILU_GATED, activate
from executor_svc.kernels.cpu.vector import LANES, load_i64, vload_first, vstore_first

# Fields of the arguments, from FIRST_ARG on; strides are in bytes.
(_PRODUCT, _PRODUCT_STRIDE, _NUM_ROWS, _WIDTH, _OUT, _OUT_STRIDE, _MODE) = range(FIRST_ARG, FIRST_ARG + 7)


@kernel("7q")
def finish_bf16(args: int) -> None:
    """Stores, adds, or activates and stores rows of a product."""
    width, num_rows, mode = load_i64(args, _WIDTH), load_i64(args, _NUM_ROWS), load_i64(args, _MODE)
    thread, threads = thread_idx(args), num_threads(args)
    for row in range(num_rows * thread // threads, num_rows * (thread + 1) // threads):
        product = load_i64(args, _PRODUCT) + row * load_i64(args, _PRODUCT_STRIDE)
        out = load_i64(args, _OUT) + row * load_i64(args, _OUT_STRIDE)
        for i in range(0, width, LANES):
            n = min(LANES, width - i)
            value = vload_first(product + 2 * i, n, "bf16")
            if mode >= SILU_GATED:
                value = activate(value, mode) * vload_first(product + 2 * (width + i), n, "bf16")
            elif mode == ADD:
                value = value + vload_first(out + 4 * i, n, "f32")
            vstore_first(out + 4 * i, value, n, "f32")


def finish(product: Tensor, out: Tensor, mode: int) -> Tensor:
    """Brings a product into out.

    Args:
        product: bfloat16 [num_rows, width], in a gated mode [num_rows, 2 * width] with the gate's columns first; the last
            dimension contiguous.
        out: float32 [num_rows, width], the last dimension contiguous.
        mode: of linear.py.

    Returns:
        out.
    """
    num_rows, width = out.shape
    finish_bf16(
        product.data_ptr(),
        product.stride(0) * 2,
        num_rows,
        width,
        out.data_ptr(),
        out.stride(0) * 4,
        mode,
        threads=torch.get_num_threads(),
    )
    return out
