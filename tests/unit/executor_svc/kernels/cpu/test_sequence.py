"""Kernels that run as one compute what they compute one by one."""

import pytest
import torch

from executor_svc.kernels.cpu.linear import ADD, PLAIN
from executor_svc.kernels.cpu.norm import rms_norm, rms_norm_arguments
from executor_svc.kernels.cpu.packed_weight import pack
from executor_svc.kernels.cpu.sequence import KernelSequence


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_each_kernel_sees_what_the_one_before_wrote(num_rows: int, num_threads: int) -> None:
    """Norm, product, product added to the input: every barrier matters, since rows and panels are split differently."""
    torch.set_num_threads(num_threads)
    width, inner = 96, 224
    weight, up, down = torch.randn(width), pack(torch.randn(inner, width)), pack(torch.randn(width, inner))
    start = torch.randn(num_rows, width)
    x, normed, hidden = start.clone(), torch.full((num_rows, width), torch.nan), torch.full((num_rows, inner), torch.nan)
    calls = [
        rms_norm_arguments(x, weight, 1e-5, normed),
        up.arguments(normed, hidden, PLAIN),
        down.arguments(hidden, x, ADD),
    ]
    kernels = [(kernel.address, kernel.pack(*fields, threads=num_threads)) for kernel, fields in calls]
    sequence = KernelSequence(kernels * 3, num_threads)

    sequence.run()

    expected = start
    for _ in range(3):
        expected = expected + down.apply(up.apply(rms_norm(expected, weight, 1e-5)))
    assert torch.allclose(x, expected, rtol=1e-5, atol=1e-5)
    sequence.run()  # the arguments are still good
    assert not torch.equal(x, expected)
