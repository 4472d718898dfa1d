"""RMS norms in Triton's interpreter against float64, with poisoned outputs."""

import pytest
import torch

from executor_svc.kernels.triton.norm import add_rms_norm, rms_norm, rms_norm_reference, sandwich_rms_norm

WIDTH = 37


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset: float) -> None:
    x, weight = torch.randn(3, WIDTH + 2)[:, :WIDTH], torch.randn(WIDTH)
    out = torch.full((3, WIDTH), float("nan"))
    rms_norm(x, weight, 1e-6, out, offset=offset)
    torch.testing.assert_close(out.double(), rms_norm_reference(x.double(), weight, 1e-6, offset=offset), rtol=1e-5, atol=1e-5)


def test_epsilon_counts_in_small_rows() -> None:
    x, weight, out = torch.randn(2, WIDTH) * 1e-3, torch.ones(WIDTH), torch.empty(2, WIDTH)
    rms_norm(x, weight, 1e-2, out)
    torch.testing.assert_close(out.double(), rms_norm_reference(x.double(), weight, 1e-2), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("has_post_norm", [False, True])
def test_the_residual_stream_grows_and_is_normalised(has_post_norm: bool, offset: float) -> None:
    x, residual = torch.randn(3, WIDTH), torch.randn(3, WIDTH + 5)[:, :WIDTH]
    weight, post = torch.randn(WIDTH), torch.randn(WIDTH)
    added = rms_norm_reference(x.double(), post, 1e-6, offset=offset) if has_post_norm else x.double()
    wanted = residual.double() + added
    out = torch.full((3, WIDTH), float("nan"))
    if has_post_norm:
        sandwich_rms_norm(x, residual, post, weight, 1e-6, out, offset=offset)
    else:
        add_rms_norm(x, residual, weight, 1e-6, out, offset=offset)
    torch.testing.assert_close(residual.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), rms_norm_reference(wanted, weight, 1e-6, offset=offset), rtol=1e-5, atol=1e-4)


def test_no_rows_are_no_work() -> None:
    out = torch.empty(0, WIDTH)
    assert rms_norm(torch.empty(0, WIDTH), torch.ones(WIDTH), 1e-6, out) is out
