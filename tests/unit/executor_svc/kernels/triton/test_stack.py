"""A tiny decoder as one stack, its kernels in Triton's interpreter, against the same stack in plain torch."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.triton.backend import TritonBackend
from executor_svc.model.attention import ATTENTION_NAME, register_attention
from executor_svc.model.cuda_functions import triton_functions
from executor_svc.model.cuda_rewrite import StackedModel, rewrite_for_cuda
from executor_svc.model.forward_context import ForwardContext, use
from executor_svc.model.self_check import packed_batch
from executor_svc.model.stack_functions import TORCH_FUNCTIONS
from executor_svc.step_inspection import rewrite_variants
from tests.unit.executor_svc.model.tiny import config_of, disturb_vectors

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "vocab_size": 20,
}
CONFIGS = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20}),
    "phi3": ("Phi3Config", {"num_key_value_heads": 2}),
}


@torch.inference_mode()
def run(model: Any, forward: Any) -> Tensor:
    """A chunk and a decode together, then decodes alone; logits of some tokens."""
    model.forward = forward
    shape = (4, model.config.num_key_value_heads, 16, 16)
    caches = [LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(2)]
    backend = TritonBackend(max_num_seqs=4)
    found = []
    for parts in ([(0, 0, 3)], [(0, 3, 4), (1, 0, 4)], [(1, 4, 5), (0, 4, 5)]):
        batch = packed_batch(parts, [[3, 1], [2]], block_size=16)
        positions = torch.cat([torch.arange(start, end) for _, start, end in parts])
        with use(ForwardContext(batch, backend, caches)):
            out = model(
                input_ids=(positions * 3 + 1)[None] % 20,
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=torch.tensor([0, len(positions) - 1]),
            )
        found.append(out.logits[0])
    return torch.cat(found)


@pytest.mark.parametrize("family", CONFIGS)
def test_kernels_compute_what_torch_does(family: str) -> None:
    register_attention()
    class_name, changes = CONFIGS[family]
    model = transformers.AutoModelForCausalLM.from_config(config_of(class_name, **TINY, **changes), dtype=torch.float32)
    disturb_vectors(model)
    rewrite_for_cuda(model.eval().requires_grad_(False), functions=TORCH_FUNCTIONS)
    stacked: StackedModel = model.forward
    wanted = run(model, stacked)
    torch.testing.assert_close(run(model, stacked.with_functions(triton_functions(CPU))), wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def wanted_rows(model: Any, stacked: StackedModel, *, many_tokens: int, trimmed_tokens: int) -> list[Tensor]:
    """A chunk that nobody wants a token of, its sequence's last chunk beside a decode and another chunk, decodes of all."""
    stacked.stack.many_tokens, stacked.stack.trimmed_tokens = many_tokens, trimmed_tokens
    model.forward = stacked
    shape = (6, model.config.num_key_value_heads, 16, 16)
    caches = [LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(2)]
    backend, found = TritonBackend(max_num_seqs=4), []
    for parts, keep in (
        ([(0, 0, 9), (1, 0, 3)], []),
        ([(1, 3, 4), (0, 9, 18), (2, 0, 5)], [9, 0, 14]),
        ([(0, 18, 19), (1, 4, 5), (2, 5, 6)], [0, 1, 2]),
    ):
        batch = packed_batch(parts, [[3, 1], [2], [4]], block_size=16)
        query_lens, kv_lens = [stop - start for _, start, stop in parts], [stop for _, _, stop in parts]
        batch = dataclasses.replace(batch, query_lens=query_lens, kv_lens=kv_lens)
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in parts])
        with use(ForwardContext(batch, backend, caches)):
            ids, rows = (positions * 3 + 1)[None] % 20, torch.tensor(keep, dtype=torch.int64)
            out = model(input_ids=ids, position_ids=positions[None], use_cache=False, logits_to_keep=rows)
        found.append(out.logits[0])
    return found


@pytest.mark.parametrize(("family", "many_tokens"), [("llama", 1), ("gemma3", 1), ("qwen3", 1000)])
def test_the_last_layer_of_wanted_tokens_alone_is_the_same(family: str, many_tokens: int) -> None:
    register_attention()
    class_name, changes = CONFIGS[family]
    model = transformers.AutoModelForCausalLM.from_config(config_of(class_name, **TINY, **changes), dtype=torch.float32)
    disturb_vectors(model)
    rewrite_for_cuda(model.eval().requires_grad_(False), functions=TORCH_FUNCTIONS)
    stacked: StackedModel = model.forward
    wanted = wanted_rows(model, stacked, many_tokens=many_tokens, trimmed_tokens=1000)
    functions = TORCH_FUNCTIONS if family == "gemma3" else triton_functions(CPU)
    found = wanted_rows(model, stacked.with_functions(functions), many_tokens=many_tokens, trimmed_tokens=1)
    assert [len(logits) for logits in found] == [0, 3, 3]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_every_rewrite_can_be_off_by_itself() -> None:
    register_attention()
    config = config_of("LlamaConfig", num_key_value_heads=1, **{**TINY, "num_hidden_layers": 2})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.set_attn_implementation(ATTENTION_NAME)
    found = {variant.name: run(model, variant.forward) for variant in rewrite_variants(model.eval().requires_grad_(False), CPU)}
    wanted = found.pop("none: transformers' own modules")
    assert len(found) == 6
    for logits in found.values():
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
