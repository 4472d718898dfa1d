"""Compiles norms, activations and products for one architecture; a process of its own, where nothing is interpreted.

Arguments: the architecture (for example 90) and the dtype (for example bfloat16).
"""

import sys
from itertools import product

import torch

from executor_svc.kernels.triton.activation import act_mul
from executor_svc.kernels.triton.linear import StreamWorkspace, stream_linear
from executor_svc.kernels.triton.linear_configs import ProductShape, by_rule
from executor_svc.kernels.triton.norm import add_rms_norm, rms_norm, sandwich_rms_norm
from tests.unit.executor_svc.kernels.triton.compile_only import compiling_for

WIDTH = 512
SHAPES = [(1, 4096, 4096, False), (2, 1024, 1024, True), (8, 1024, 2048, False), (16, 3072, 1024, True), (32, 4096, 4096, False)]


def compile_all(dtype: torch.dtype, *, overlap: bool) -> None:
    meta, workspace = torch.device("meta"), StreamWorkspace.for_device(torch.device("meta"))
    x = torch.empty(3, WIDTH, dtype=dtype, device=meta)
    weight, residual = (torch.empty(n, dtype=torch.float32, device=meta) for n in (WIDTH, 3 * WIDTH))
    residual = residual.view(3, WIDTH)
    rms_norm(x, weight, 1e-6, x, overlap=overlap)
    rms_norm(x, weight, 1e-6, x, rows=torch.empty(3, dtype=torch.int64, device=meta), overlap=overlap)
    add_rms_norm(x, residual, weight, 1e-6, x, overlap=overlap)
    sandwich_rms_norm(x, residual, weight, weight, 1e-6, x, overlap=overlap)
    for activation in ("silu", "gelu_tanh"):
        act_mul(torch.empty(3, 2 * WIDTH, dtype=dtype, device=meta), x, activation, overlap=overlap)
    for (rows, outputs, depth, is_gated), has_bias in product(SHAPES, (False, True)):
        choice = by_rule(ProductShape(rows, outputs, depth, is_gated, str(dtype).removeprefix("torch.")))
        assert choice.config is not None
        stream_linear(
            torch.empty(rows, depth, dtype=dtype, device=meta),
            torch.empty(outputs * (2 if is_gated else 1), depth, dtype=dtype, device=meta),
            torch.empty(rows, outputs, dtype=dtype, device=meta),
            choice.config,
            workspace,
            bias=torch.empty(outputs * (2 if is_gated else 1), dtype=dtype, device=meta) if has_bias else None,
            activation="silu" if is_gated else None,
            reduce=choice.reduce,
            overlap=overlap,
        )


def main() -> None:
    capability, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
    with compiling_for(capability) as device:
        compile_all(dtype, overlap=capability >= 90)
    print(*device.compiled)


if __name__ == "__main__":
    main()
