"""Long chunks as a decoder stack attends to them on the GPU, against float64: heads of a token packed, rows up to the grid."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from executor_svc.kernels.triton.backend import TritonBackend
from tests.gpu.kernels.test_attention import on_gpu
from tests.unit.executor_svc.kernels.batches import Shape
from tests.unit.executor_svc.kernels.triton.steps import expected, make_rows_step
from tests.unit.executor_svc.model.packed_steps import attend_packed

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "seq_lens", "query_lens"),
    [
        (Shape(4, 2, 128, 128, 16, BF16), [2560], [2560]),
        (Shape(4, 2, 128, 128, 16, BF16), [2700], [2700]),
        (Shape(3, 1, 64, 64, 16, torch.float16), [2500], [2500]),
        (Shape(4, 2, 128, 128, 16, BF16), [300, 7, 5000], [1, 1, 2999]),
        (Shape(4, 1, 128, 128, 16, BF16), [4096], [2048]),
        (Shape(4, 1, 128, 128, 16, BF16), [9000], [2048]),
        (Shape(4, 2, 128, 128, 16, BF16), [2600, 1700, 2500], [2600, 100, 2500]),
        (Shape(4, 2, 128, 128, 16, torch.float32), [1500], [1100]),
    ],
    ids=str,
)
def test_packed_heads(shape: Shape, seq_lens: list[int], query_lens: list[int]) -> None:
    torch.manual_seed(0)
    step = make_rows_step(shape, seq_lens, query_lens)
    wanted, wanted_cache = expected(step, scale=0.1)
    moved, backend = on_gpu(step), TritonBackend()
    for _ in range(2):
        # The allocator hands out what was just freed: rows that nobody wrote would show as NaN.
        poison = [torch.full((16 << 20,), float("nan"), device="cuda") for _ in range(4)]
        del poison
        out = attend_packed(backend, moved, 0.1)
        tolerance = 1e-4 if shape.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out.double().cpu(), wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(moved.cache.key.cpu(), wanted_cache.key, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(moved.cache.value.cpu(), wanted_cache.value, equal_nan=True, atol=0, rtol=0)
