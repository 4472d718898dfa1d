"""RMS normalisation against float64."""

import pytest
import torch
from torch.nn import functional

from executor_svc.kernels.cpu.norm import rms_norm


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("num_rows, width", [(1, 576), (3, 33), (7, 16), (100, 300), (2, 5)])
def test_equals_float64(num_rows: int, width: int, dtype: torch.dtype, tolerance: float, threads: int) -> None:
    x, weight = torch.randn(num_rows, width).to(dtype), torch.rand(width) + 0.5

    found = rms_norm(x, weight, 1e-5)

    expected = functional.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_rows_may_be_strided() -> None:
    x, weight = torch.randn(5, 64)[:, :40], torch.ones(40)

    torch.testing.assert_close(rms_norm(x, weight, 1e-6), functional.rms_norm(x, (40,), weight, 1e-6))
