"""Streaming products on the GPU against float64, with poisoned outputs."""

from itertools import product
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from executor_svc.kernels.triton.activation import act_mul, act_mul_reference
from executor_svc.kernels.triton.linear import StreamConfig, StreamWorkspace, stream_linear

DEVICE = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def workspace() -> StreamWorkspace:
    return StreamWorkspace.for_device(DEVICE)


def check(workspace: StreamWorkspace, num_rows: int, config: StreamConfig, **case: Any) -> None:
    dtype, outputs, depth = case["dtype"], case["outputs"], case["depth"]
    activation, reduce, has_bias = case["activation"], case["reduce"], case["has_bias"]
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator)

    x = normal(num_rows, depth + 8).to(dtype)[:, :depth]
    weight = (normal(outputs * (2 if activation else 1), depth) * depth**-0.5).to(dtype)
    bias = normal(weight.shape[0]).to(dtype) if has_bias else None
    out = torch.full((num_rows, outputs + 8), float("nan"), dtype=dtype, device=DEVICE)[:, :outputs]
    wanted = x.double() @ weight.double().T
    if bias is not None:
        wanted += bias.double()
    if activation:
        wanted = act_mul_reference(wanted, activation)
    for _ in range(3):  # again: counters must be back at zero
        stream_linear(x, weight, out, config, workspace, bias=bias, activation=activation, reduce=reduce)
    difference = (out.double() - wanted).abs().max() / wanted.abs().max()
    assert difference < TOLERANCE[dtype], (num_rows, config, case, float(difference))
    assert int(workspace.arrivals.sum()) == 0


@pytest.mark.parametrize(("num_rows", "dtype"), [(1, torch.bfloat16), (3, torch.bfloat16), (4, torch.float16)])
def test_reduce_kernel(workspace: StreamWorkspace, num_rows: int, dtype: torch.dtype) -> None:
    cases = [(None, False), ("silu", True), ("gelu_tanh", False)]
    for (outputs, depth), (activation, has_bias) in product([(96, 512), (97, 520)], cases):
        config = StreamConfig(8, 512, 4, 1, 1, 256) if depth == 512 else StreamConfig(16, 256, 4, 3)
        check(
            workspace, num_rows, config,
            dtype=dtype, outputs=outputs, depth=depth, activation=activation, reduce=True, has_bias=has_bias,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(1, torch.bfloat16), (8, torch.float16), (13, torch.bfloat16), (64, torch.bfloat16)]
)
def test_tensor_kernel(workspace: StreamWorkspace, num_rows: int, dtype: torch.dtype) -> None:
    configs = [
        StreamConfig(16, 128, 4, 3),
        StreamConfig(64, 64, 4, 4, 4, 128),
        StreamConfig(128, 64, 8, 3, 2, ahead=999),
        StreamConfig(32, 128, 4, 3, 3, ahead=1),
    ]
    for (outputs, depth), (activation, has_bias), config in product(
        [(128, 1024), (200, 1032)], [(None, False), ("silu", True)], configs
    ):
        check(
            workspace, num_rows, config,
            dtype=dtype, outputs=outputs, depth=depth, activation=activation, reduce=False, has_bias=has_bias,
        )  # fmt: skip


def test_products_that_follow_each_other_see_each_other(workspace: StreamWorkspace) -> None:
    """A chain in a CUDA graph, each product fed with the one before it: nothing starts before its input is there."""
    weight = torch.randn(1024, 1024, device=DEVICE, dtype=torch.bfloat16) / 32
    rows = [torch.randn(8, 1024, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    configs = [StreamConfig(64, 64, 4, 4, 4, 256), StreamConfig(16, 128, 4, 3, 1, 1024)]

    def chain() -> None:
        for i in range(40):
            stream_linear(rows[i % 2], weight, rows[(i + 1) % 2], configs[i % 2], workspace)

    start = rows[0].clone()
    wanted = start.clone()
    for _ in range(40):
        wanted = (wanted.float() @ weight.float().T).to(torch.bfloat16)
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        rows[0].copy_(start)
        rows[1].fill_(float("nan"))
        graph.replay()
        difference = (rows[0].float() - wanted.float()).abs().max() / wanted.float().abs().max()
        assert difference < 0.1


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_act_mul(activation: str) -> None:
    gate_up = torch.randn(7, 2 * 1000, device=DEVICE, dtype=torch.bfloat16)
    out = torch.full((7, 1000), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    act_mul(gate_up, out, activation)
    torch.testing.assert_close(out.double(), act_mul_reference(gate_up.double(), activation), rtol=1e-2, atol=1e-3)
