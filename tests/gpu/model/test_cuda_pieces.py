"""Layers captured in pieces compute what they compute kernel by kernel: chunks of any length, decodes beside them, padding."""

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from executor_svc.cuda.stream import CudaStream
from executor_svc.kernels.layout import KEYS_AS_ROWS
from executor_svc.kernels.triton.backend import TritonBackend
from executor_svc.model.cuda_pieces import LayerPieces
from executor_svc.model.cuda_rewrite import rewrite_for_cuda
from tests.gpu.model.test_cuda_stack import DEVICE, NUM_LAYERS, make_model
from tests.unit.executor_svc.model.piece_steps import logits_of, poisoned_caches, steps_of
from tests.unit.executor_svc.model.tiny import STACKED

STEPS = steps_of([13, 6, 237])


@pytest.mark.parametrize("many_tokens", [1, 10_000])
@pytest.mark.parametrize("form", ["llama", "qwen3", "gemma3"])
def test_logits_are_those_of_the_stack(form: str, many_tokens: int) -> None:
    exact = make_model(STACKED[form](), torch.bfloat16).float()
    model = make_model(STACKED[form](), torch.bfloat16)
    backend = TritonBackend(max_num_seqs=64)
    for each in (exact, model):
        rewrite_for_cuda(each)
        each.forward.stack.trimmed_tokens, each.forward.stack.many_tokens = 1, many_tokens
    expected = logits_of(exact, caches_of(exact, torch.float32), STEPS, backend)
    eager = logits_of(model, caches_of(model, torch.bfloat16), STEPS, backend)

    caches, stream, stack = caches_of(model, torch.bfloat16), CudaStream(DEVICE), model.forward.stack
    stack.pieces = LayerPieces(stack, caches, 512)
    with stream.use(), torch.inference_mode():
        stack.pieces.capture(stream, [239, 256, 512])
        for _ in range(2):  # the second time over what the first left in memory
            found = logits_of(model, caches, STEPS, backend)
            scale = expected.abs().max()
            own, ours = ((logits - expected).abs().mean() / scale for logits in (eager, found))
            assert ours < 1.2 * own + 1e-3, (float(ours), float(own))
    stream.check()


def caches_of(model: Any, dtype: torch.dtype) -> Any:
    return poisoned_caches(model.config, NUM_LAYERS, dtype, DEVICE, KEYS_AS_ROWS)
