"""Short launches on the GPU compute what Triton's own do, whatever their arguments change between calls."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from itertools import product

from executor_svc.kernels.triton.launch import Launch
from tests.unit.executor_svc.kernels.triton.launch_kernel import scaled_rows, scaled_rows_reference

DEVICE = torch.device("cuda")


def test_alignments_sizes_and_strides_that_change_between_calls() -> None:
    launch = Launch(scaled_rows)
    memory = torch.randn(5000, device=DEVICE).to(torch.bfloat16)
    ids = torch.randint(9, (40,), device=DEVICE)
    cases = list(product((0, 1, 8), (0, 1), (1, 5, 16, 33), (1, 16, 17, 250)))
    for _ in range(2):  # the first may go Triton's way
        for start, ids_at, size, stride in cases:
            x, picked = memory[start:], ids[ids_at : ids_at + 7]
            wanted = scaled_rows_reference(x, picked, size, stride, 0.37, 2)
            for grid, width, dtype in (((7, 4), 16, torch.float32), ((7, 2), 32, torch.bfloat16)):
                # The odd start of the result is a variant of its own.
                out = torch.full((start + 7 * size,), float("nan"), dtype=dtype, device=DEVICE)
                plain = torch.full_like(out, float("nan"))
                launch(grid, x, picked, out[start:], size, stride, 0.37, WIDTH=width, ADD=2)
                scaled_rows[grid](x, picked, plain[start:], size, stride, 0.37, WIDTH=width, ADD=2)
                assert torch.equal(out[start:], plain[start:])
                tolerance = 1e-5 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(out[start:].view(7, size).double(), wanted, atol=tolerance, rtol=tolerance)


def test_other_streams_and_graphs() -> None:
    launch, x = Launch(scaled_rows), torch.randn(64, device=DEVICE)
    picked, out = torch.tensor([1, 0], device=DEVICE), torch.zeros(2, 16, device=DEVICE)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def step() -> None:
        launch((2,), x, picked, out, 16, 32, 2.0, WIDTH=16, ADD=0)

    step()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    x.add_(1)
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out.double(), scaled_rows_reference(x, picked, 16, 32, 2.0, 0))
