"""Streaming products in Triton's interpreter against float64, with poisoned outputs."""

import pytest
import torch

from executor_svc.kernels.triton.activation import act_mul, act_mul_reference
from executor_svc.kernels.triton.linear import StreamConfig, StreamWorkspace, stream_linear

CPU = torch.device("cpu")
WHOLE, ODD = (32, 64), (20, 70)


def make_workspace() -> StreamWorkspace:
    return StreamWorkspace(1 << 14, 16, CPU)


def check(
    num_rows: int,
    shape: tuple[int, int],
    config: StreamConfig,
    *,
    activation: str | None = None,
    has_bias: bool = False,
    reduce: bool = False,
) -> None:
    outputs, depth = shape
    x = torch.randn(num_rows, depth + 6)[:, :depth]
    weight = torch.randn(outputs * (2 if activation else 1), depth) * depth**-0.5
    bias = torch.randn(weight.shape[0]) if has_bias else None
    out = torch.full((num_rows, outputs + 3), float("nan"))[:, :outputs]
    wanted = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    if activation is not None:
        wanted = act_mul_reference(wanted, activation)
    workspace = make_workspace()
    stream_linear(x, weight, out, config, workspace, bias=bias, activation=activation, reduce=reduce)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-4)
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [WHOLE, ODD])
def test_reduce_kernel(num_rows: int, shape: tuple[int, int]) -> None:
    check(num_rows, shape, StreamConfig(8, 32), reduce=True)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", None])
@pytest.mark.parametrize("has_bias", [False, True])
def test_reduce_kernel_with_all_that_can_be_fused(activation: str | None, has_bias: bool) -> None:
    check(3, ODD, StreamConfig(16, 32), reduce=True, activation=activation, has_bias=has_bias)


@pytest.mark.parametrize("num_rows", [1, 5, 16, 33])
@pytest.mark.parametrize("shape", [WHOLE, ODD])
@pytest.mark.parametrize("split_k", [1, 3])
def test_tensor_kernel(num_rows: int, shape: tuple[int, int], split_k: int) -> None:
    check(num_rows, shape, StreamConfig(16, 16, split_k=split_k))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", None])
@pytest.mark.parametrize("split_k", [1, 2])
def test_tensor_kernel_with_all_that_can_be_fused(activation: str | None, split_k: int) -> None:
    check(3, ODD, StreamConfig(16, 32, split_k=split_k), activation=activation, has_bias=True)


def test_a_result_may_have_another_dtype() -> None:
    x, weight = torch.randn(2, 64), torch.randn(16, 64)
    out = torch.full((2, 16), float("nan"), dtype=torch.float64)
    stream_linear(x, weight, out, StreamConfig(8, 32), make_workspace(), reduce=True)
    torch.testing.assert_close(out, x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_act_mul(activation: str) -> None:
    gate_up = torch.randn(3, 2 * 1100 + 5)[:, : 2 * 1100]
    out = torch.full((3, 1100), float("nan"))
    act_mul(gate_up, out, activation)
    torch.testing.assert_close(out.double(), act_mul_reference(gate_up.double(), activation), rtol=1e-5, atol=1e-6)
