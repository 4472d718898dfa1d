"""RMS norms on the GPU against float64, with poisoned outputs."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from torch import Tensor

from executor_svc.kernels.triton.norm import add_rms_norm, rms_norm, rms_norm_reference, sandwich_rms_norm


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [37, 4096, 16384])
@pytest.mark.parametrize("num_rows", [1, 700])
def test_norms(num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight, post = normal(num_rows, width).to(dtype), normal(width).to(dtype), normal(width).to(dtype)
    rtol, atol = (1e-2, 2e-2) if dtype != torch.float32 else (1e-4, 1e-4)
    for offset in (0.0, 1.0):
        out = torch.full_like(x, float("nan"))
        rms_norm(x, weight, 1e-6, out, offset=offset)
        torch.testing.assert_close(
            out.double(), rms_norm_reference(x.double(), weight, 1e-6, offset=offset), rtol=rtol, atol=atol
        )
        for post_weight in (None, post):
            residual = normal(num_rows, width)
            added = x.double() if post_weight is None else rms_norm_reference(x.double(), post_weight, 1e-6, offset=offset)
            wanted = residual.double() + added
            out.fill_(float("nan"))
            if post_weight is None:
                add_rms_norm(x, residual, weight, 1e-6, out, offset=offset)
            else:
                sandwich_rms_norm(x, residual, post_weight, weight, 1e-6, out, offset=offset)
            torch.testing.assert_close(residual.double(), wanted, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                out.double(), rms_norm_reference(wanted, weight, 1e-6, offset=offset), rtol=rtol, atol=atol
            )
