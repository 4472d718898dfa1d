"""Long chunks as a decoder stack attends to them on the GPU, against float64: heads of a token packed, rows up to the grid."""

import dataclasses

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from executor_svc.kernels.triton.backend import TritonBackend
from executor_svc.model.cuda_rewrite import rewrite_for_cuda
from executor_svc.model.forward_context import ForwardContext, use
from executor_svc.model.self_check import packed_batch
from tests.gpu.kernels.test_attention import on_gpu
from tests.gpu.model.test_cuda_stack import make_caches, make_model, on_device
from tests.unit.executor_svc.kernels.batches import Shape
from tests.unit.executor_svc.kernels.triton.steps import expected, make_rows_step
from tests.unit.executor_svc.model.packed_steps import attend_packed
from tests.unit.executor_svc.model.tiny import STACKED

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "seq_lens", "query_lens"),
    [
        (Shape(4, 2, 128, 128, 16, BF16), [2560], [2560]),
        (Shape(4, 2, 128, 128, 16, BF16), [2700], [2700]),
        (Shape(3, 1, 64, 64, 16, torch.float16), [2500], [2500]),
        (Shape(4, 2, 128, 128, 16, BF16), [300, 7, 5000], [1, 1, 2999]),
        (Shape(4, 1, 128, 128, 16, BF16), [4096], [2048]),
        (Shape(2, 1, 128, 128, 16, BF16), [12_700], [4096]),
        (Shape(2, 1, 64, 64, 16, BF16), [12_100], [3900]),
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


@pytest.mark.parametrize(("form", "dtype"), [("llama", BF16), ("qwen3", torch.float32), ("gemma3", BF16)])
def test_the_last_layer_of_wanted_tokens_alone_is_the_same(form: str, dtype: torch.dtype) -> None:
    model = make_model(STACKED[form](), dtype)
    rewrite_for_cuda(model)
    stack, table = model.forward.stack, [list(range(79, -1, -1))]
    found: dict[int, list[torch.Tensor]] = {}
    for trimmed_tokens in (10_000, 300):
        stack.trimmed_tokens, found[trimmed_tokens] = trimmed_tokens, []
        backend, caches = TritonBackend(max_num_seqs=64), make_caches(model.config, dtype)
        for start, stop, keep in ((0, 400, []), (400, 401, [0]), (401, 402, [0])):
            batch = on_device(packed_batch([(0, start, stop)], table, block_size=16))
            batch = dataclasses.replace(batch, query_lens=[stop - start], kv_lens=[stop])
            positions, rows = torch.arange(start, stop, device="cuda"), torch.tensor(keep, dtype=torch.int64, device="cuda")
            with torch.inference_mode(), use(ForwardContext(batch, backend, caches)):
                ids = ((positions * 7) % 97 + 3)[None]
                for wanted in (rows, torch.tensor([7, stop - start - 1], device="cuda") if stop - start > 1 else rows):
                    out = model(input_ids=ids, position_ids=positions[None], logits_to_keep=wanted, use_cache=False)
                    found[trimmed_tokens].append(out.logits[0].float())
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for ours, plain in zip(found[300], found[10_000], strict=True):
        assert ours.shape == plain.shape
        if plain.numel():
            assert (ours - plain).abs().max() < tolerance * plain.abs().max()
