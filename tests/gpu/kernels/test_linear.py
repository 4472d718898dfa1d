"""Streaming products on the GPU against float64, with poisoned outputs."""

from itertools import product

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from executor_svc.kernels.triton.activation import act_mul, act_mul_reference
from executor_svc.kernels.triton.linear import Norm, StreamConfig, StreamWorkspace, stream_linear
from executor_svc.kernels.triton.norm import rms_norm_reference

DEVICE = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def workspace() -> StreamWorkspace:
    return StreamWorkspace.for_device(DEVICE)


def check(workspace: StreamWorkspace, num_rows: int, config: StreamConfig, **case: object) -> None:
    dtype, outputs, depth = case["dtype"], case["outputs"], case["depth"]
    activation, reduce, add, has_bias = case["activation"], case["reduce"], case["add"], case["has_bias"]
    generator = torch.Generator(DEVICE).manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, device=DEVICE, generator=generator)  # noqa: E731
    x = normal(num_rows, depth + 8).to(dtype)[:, :depth]
    weight = (normal(outputs * (2 if activation else 1), depth) * depth**-0.5).to(dtype)
    bias = normal(weight.shape[0]).to(dtype) if has_bias else None
    norm = Norm(normal(depth), 1e-5) if reduce and add else None
    out = torch.full((num_rows, outputs + 8), float("nan"), dtype=dtype, device=DEVICE)[:, :outputs]
    if add:
        out.copy_(normal(num_rows, outputs))
    wanted = x.double()
    if norm is not None:
        wanted = rms_norm_reference(wanted, norm.weight, norm.epsilon)
    wanted = wanted @ weight.double().T
    if bias is not None:
        wanted += bias.double()
    if activation:
        wanted = act_mul_reference(wanted, activation)
    if add:
        wanted += out.double()
    for _ in range(1 if add else 3):  # again: counters must be back at zero
        stream_linear(
            x, weight, out, config, workspace, bias=bias, activation=activation, add=add, norm=norm, reduce=reduce
        )  # fmt: skip
    difference = (out.double() - wanted).abs().max() / wanted.abs().max()
    assert difference < TOLERANCE[dtype], (num_rows, config, case, float(difference))
    assert int(workspace.arrivals.sum()) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_reduce_kernel(workspace: StreamWorkspace, num_rows: int, dtype: torch.dtype) -> None:
    cases = [(None, False, False), ("silu", True, True), ("gelu_tanh", False, True), (None, True, False)]
    for (outputs, depth), (activation, add, has_bias) in product([(96, 512), (97, 520), (40, 2056)], cases):
        for config in (StreamConfig(8, 512, 4, 1, 1, 256), StreamConfig(16, 256, 4, 3)):
            check(
                workspace, num_rows, config,
                dtype=dtype, outputs=outputs, depth=depth, activation=activation, reduce=True, add=add, has_bias=has_bias,
            )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 8, 13, 32, 64])
def test_tensor_kernel(workspace: StreamWorkspace, num_rows: int, dtype: torch.dtype) -> None:
    for (outputs, depth), (activation, add) in product([(128, 1024), (200, 1032)], [(None, False), ("silu", True)]):
        for config in (
            StreamConfig(16, 128, 4, 3),
            StreamConfig(64, 64, 4, 4, 4, 128),
            StreamConfig(128, 64, 8, 3, 2),
            StreamConfig(32, 128, 4, 3, 3),
        ):
            check(
                workspace, num_rows, config,
                dtype=dtype, outputs=outputs, depth=depth, activation=activation, reduce=False, add=add, has_bias=add,
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
