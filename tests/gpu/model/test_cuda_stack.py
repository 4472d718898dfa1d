"""Rewritten models on the GPU: every family's logits against transformers' own modules, eager and in a CUDA graph."""

import dataclasses
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import transformers
from torch import Tensor

from executor_svc.kernels.batch import AttentionBatch, LayerCache
from executor_svc.kernels.triton.backend import TritonBackend
from executor_svc.model.attention import ATTENTION_NAME, register_attention
from executor_svc.model.cuda_rewrite import rewrite_for_cuda
from executor_svc.model.forward_context import ForwardContext, use
from executor_svc.model.self_check import packed_batch
from tests.unit.executor_svc.model.tiny import STACKED, disturb_vectors

DEVICE = torch.device("cuda")
HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 16, 16, 4


def make_model(config: Any, dtype: torch.dtype) -> Any:
    register_attention()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    disturb_vectors(model)
    model.set_attn_implementation(ATTENTION_NAME)
    return model.to(DEVICE, dtype).eval().requires_grad_(False)


def make_caches(config: Any, dtype: torch.dtype) -> list[LayerCache]:
    shape = (80, config.num_key_value_heads, BLOCK_SIZE, HEAD_DIM)
    return [LayerCache(*(torch.full(shape, 1e4, dtype=dtype, device=DEVICE) for _ in range(2))) for _ in range(NUM_LAYERS)]


def on_device(batch: AttentionBatch) -> AttentionBatch:
    tensors: dict[str, Any] = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    moved: dict[str, Any] = {name: value.to(DEVICE) for name, value in tensors.items() if isinstance(value, Tensor)}
    return dataclasses.replace(batch, **moved)


@torch.inference_mode()
def logits(model: Any, num_seqs: int) -> Tensor:
    """Sequences of 40 tokens: chunks, a mix of chunks and decodes, then decodes; logits of all tokens."""
    caches = make_caches(model.config, next(model.parameters()).dtype)
    backend = TritonBackend(max_num_seqs=64)
    tables = [[3 * seq + 2, 3 * seq, 3 * seq + 1] for seq in range(num_seqs)]
    token_ids = (torch.arange(40)[None] * 7 + torch.arange(num_seqs)[:, None] * 11) % 120 + 3
    found = []
    first = [(seq, 0, 30 + seq % 3) for seq in range(num_seqs)]
    second = [(seq, end, end + 1 if seq % 2 else end + 5) for seq, _, end in first]
    third = [(seq, end, end + 1) for seq, _, end in second]
    for parts in (first, second, third):
        parts = sorted(parts, key=lambda part: part[2] - part[1] != 1)
        batch = on_device(packed_batch(parts, tables, block_size=BLOCK_SIZE))
        ids = torch.cat([token_ids[seq, start:end] for seq, start, end in parts]).to(DEVICE)
        positions = torch.cat([torch.arange(start, end) for _, start, end in parts]).to(DEVICE)
        with use(ForwardContext(batch, backend, caches)):
            out = model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        found.append(out.logits[0].float())
    return torch.cat(found)


@pytest.mark.parametrize("num_seqs", [2, 7])
@pytest.mark.parametrize("form", STACKED)
def test_float32_logits_stay(form: str, num_seqs: int) -> None:
    model = make_model(STACKED[form](), torch.float32)
    before = logits(model, num_seqs)
    report = rewrite_for_cuda(model)
    assert report.counts["stack"] == 1, str(report)
    difference = (logits(model, num_seqs) - before).abs().max() / before.abs().max()
    assert difference < 1e-4


@pytest.mark.parametrize(("num_seqs", "dtype"), [(1, torch.bfloat16), (7, torch.float16), (20, torch.bfloat16)])
@pytest.mark.parametrize("form", STACKED)
def test_sixteen_bits_are_no_worse_than_transformers(form: str, num_seqs: int, dtype: torch.dtype) -> None:
    exact = logits(make_model(STACKED[form](), dtype).float(), num_seqs)
    model = make_model(STACKED[form](), dtype)
    before = logits(model, num_seqs)
    rewrite_for_cuda(model)
    model.forward.stack.many_tokens = 1 if num_seqs == 7 else 1000
    after = logits(model, num_seqs)
    scale = exact.abs().max()
    own, ours = ((found - exact).abs().mean() / scale for found in (before, after))
    assert ours < 1.5 * own + 1e-3, (float(ours), float(own))


@pytest.mark.parametrize(("form", "num_seqs"), [("llama", 1), ("qwen3", 4), ("gemma3", 8), ("llama", 33)])
def test_a_captured_decode_computes_the_same(form: str, num_seqs: int) -> None:
    model = make_model(STACKED[form](), torch.bfloat16)
    rewrite_for_cuda(model)
    caches = make_caches(model.config, torch.bfloat16)
    for cache in caches:
        cache.key.normal_()
        cache.value.normal_()
    backend = TritonBackend(max_num_seqs=64)
    parts = [(seq, 20, 21) for seq in range(num_seqs)]
    tables = [[2 * seq, 2 * seq + 1] for seq in range(num_seqs)]
    batch = on_device(packed_batch(parts, tables, block_size=BLOCK_SIZE))
    ids = torch.arange(num_seqs, device=DEVICE) % 100
    positions = torch.full((num_seqs,), 20, device=DEVICE)
    keep = torch.arange(num_seqs, device=DEVICE)

    def step() -> Tensor:
        with use(ForwardContext(batch, backend, caches)):
            found: Tensor = model(input_ids=ids[None], position_ids=positions[None], logits_to_keep=keep).logits[0]
        return found

    with torch.inference_mode():
        step()
        eager = step().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for _ in range(3):
            captured.fill_(float("nan"))
            graph.replay()
            torch.testing.assert_close(captured, eager, rtol=0, atol=0)
        # Other values in the same memory.
        ids.add_(5)
        batch.seq_lens.sub_(3)
        positions.sub_(3)
        batch.slot_mapping.sub_(3)
        graph.replay()
        torch.testing.assert_close(captured, step(), rtol=0, atol=0)
