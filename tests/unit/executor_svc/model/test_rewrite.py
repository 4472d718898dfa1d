"""Rewritten models compute what they computed before."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.cpu import CpuBackend
from executor_svc.kernels.torch_backend import TorchBackend
from executor_svc.model.attention import ATTENTION_NAME, register_attention
from executor_svc.model.forward_context import ForwardContext, use
from executor_svc.model.quantize import quantize_model
from executor_svc.model.rewrite import rewrite_model
from executor_svc.model.rewrite_forms import rms_norm_weight
from executor_svc.model.rewrite_modules import MergedPart, PackedEmbedding, PackedLinear
from executor_svc.model.self_check import packed_batch
from tests.unit.executor_svc.model.tiny import config_of

NUM_LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 16


def make_model(class_name: str = "LlamaConfig", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    register_attention()
    model = transformers.AutoModelForCausalLM.from_config(config_of(class_name, **changes), dtype=dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def logits(model: nn.Module, backend: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Two sequences, in chunks and then as decodes; logits of all tokens."""
    caches = [
        LayerCache(
            torch.zeros(4, KV_HEADS, HEAD_DIM, 16, dtype=dtype),
            torch.zeros(4, KV_HEADS, 16, HEAD_DIM, dtype=dtype),
        )
        for _ in range(NUM_LAYERS)
    ]
    token_ids = [torch.arange(20) % 50 + 3, torch.arange(9) % 50 + 30]
    found = []
    for parts in ([(0, 0, 13), (1, 0, 8)], [(1, 8, 9), (0, 13, 19)], [(0, 19, 20)]):
        batch = packed_batch(parts, [[3, 1], [2]], block_size=16)
        ids = torch.cat([token_ids[seq][start:end] for seq, start, end in parts])
        positions = torch.cat([torch.arange(start, end) for _, start, end in parts])
        with use(ForwardContext(batch, backend, caches)):
            found.append(model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0].float())
    return torch.cat(found)


@pytest.mark.parametrize(
    "class_name, changes, rewritten",
    [
        ("LlamaConfig", {}, {"layers": 4, "stacks": 1, "linear layers": 1}),
        ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}, {"layers": 4}),
        ("LlamaConfig", {"hidden_act": "gelu_pytorch_tanh"}, {"layers": 4}),
        ("LlamaConfig", {"hidden_act": "relu"}, {"attentions": 4, "merged projections": 4}),
        ("MistralConfig", {"sliding_window": 5, "head_dim": 16}, {"layers": 4}),
        ("Qwen2Config", {}, {"layers": 4}),
        ("Qwen3Config", {"head_dim": 16}, {"mlps": 4, "merged projections": 4, "norms": 17}),
        ("Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16}, {"norms": 17, "mlps": 4, "merged projections": 4}),
    ],
)
def test_float32_logits_stay(class_name: str, changes: dict[str, Any], rewritten: dict[str, int]) -> None:
    model = make_model(class_name, **changes)
    before = logits(model, TorchBackend())

    report = rewrite_model(model)

    assert report.counts.items() >= rewritten.items(), str(report)
    for backend in (TorchBackend(), CpuBackend()):
        difference = (logits(model, backend) - before).abs().max() / before.abs().max()
        assert difference < 1e-4


def test_no_weight_is_held_twice() -> None:
    model = make_model(tie_word_embeddings=True)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())

    report = rewrite_model(model)

    storages = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    assert report.counts["tied tables"] == 1
    assert isinstance(model.lm_head, PackedLinear)
    assert isinstance(model.model.embed_tokens, PackedEmbedding)
    assert model.lm_head.packed is model.model.embed_tokens.packed
    assert sum(storages.values()) < 1.1 * num_bytes


@pytest.mark.parametrize("class_name", ["LlamaConfig", "Gemma2Config", "Qwen3Config"])
def test_int8_equals_the_plain_quantised_model(class_name: str) -> None:
    model = make_model(class_name, head_dim=16, tie_word_embeddings=True)
    plain = copy.deepcopy(model)
    quantize_model(plain)
    expected = logits(plain, TorchBackend())

    rewrite_model(model, quantization="int8")

    difference = (logits(model, CpuBackend()) - expected).abs().max() / expected.abs().max()
    assert difference < (1e-4 if class_name == "LlamaConfig" else 2e-2)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("class_name", ["LlamaConfig", "MistralConfig", "Qwen2Config"])
def test_bfloat16_model_of_llamas_form_computes_nearly_as_in_float32(class_name: str, is_tied: bool) -> None:
    model = make_model(class_name, torch.bfloat16, tie_word_embeddings=is_tied)
    wide = copy.deepcopy(model).float()
    expected, before = logits(wide, TorchBackend()), logits(model, TorchBackend(), torch.bfloat16)

    report = rewrite_model(model)

    assert report.counts.items() >= {"layers": 4, "float32 residual streams": 1}.items(), str(report)
    for backend in (TorchBackend(), CpuBackend()):
        after = logits(model, backend, torch.bfloat16)
        assert (after - expected).norm() < 0.8 * (before - expected).norm()


@pytest.mark.parametrize("class_name", ["Qwen3Config", "Gemma2Config"])
def test_bfloat16_model_of_another_form_keeps_the_librarys_products(class_name: str) -> None:
    model = make_model(class_name, torch.bfloat16, head_dim=16)
    before = logits(model, TorchBackend(), torch.bfloat16)

    report = rewrite_model(model)

    assert "packed linear layers" in report.skipped
    assert type(model.lm_head) is nn.Linear
    after = logits(model, CpuBackend(), torch.bfloat16)
    assert (after - before).abs().mean() / before.abs().mean() < 0.05


def test_bfloat16_layers_are_not_fused_beside_one_that_cannot_be() -> None:
    model = make_model(dtype=torch.bfloat16)
    model.model.layers[1].mlp.act_fn = nn.ReLU()
    before = logits(model, TorchBackend(), torch.bfloat16)

    report = rewrite_model(model)

    assert "float32 residual stream" in report.skipped
    assert "layers" not in report.counts
    after = logits(model, CpuBackend(), torch.bfloat16)
    assert (after - before).abs().mean() / before.abs().mean() < 0.05


def test_projections_of_an_unknown_attention_are_merged() -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(24, 8), nn.Linear(24, 4), nn.Linear(24, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.v_proj(x) * 2, self.q_proj(x), self.k_proj(x)], dim=-1)

    module = Unknown().requires_grad_(False)
    x, y = torch.randn(2, 3, 24), torch.randn(1, 24)
    expected = [module(x), module(y), module(x)]

    rewrite_model(module)

    assert isinstance(module.q_proj, MergedPart)
    for given, wanted in zip((x, y, x), expected, strict=True):
        torch.testing.assert_close(module(given), wanted, rtol=1e-5, atol=1e-5)


def test_subclass_of_a_linear_layer_is_left_alone() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    module = nn.Sequential(Doubling(8, 8)).requires_grad_(False)

    report = rewrite_model(module)

    assert type(module[0]) is Doubling
    assert not report.counts


def test_norm_that_is_no_rms_norm_is_left_alone() -> None:
    class StrangeRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8))
            self.eps = 1e-5

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x / x.abs().mean(-1, keepdim=True)

    module = nn.Sequential(StrangeRMSNorm()).requires_grad_(False)

    report = rewrite_model(module)

    assert type(module[0]) is StrangeRMSNorm
    assert "StrangeRMSNorm" in report.skipped["norms"]


def test_norm_with_another_epsilon_than_it_says_is_left_alone() -> None:
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(16, eps=1e-5)
    assert rms_norm_weight(norm) is not None
    norm.forward = lambda x: nn.functional.rms_norm(x, (16,), norm.weight, 1e-3)

    assert rms_norm_weight(norm) is None


@torch.inference_mode()
def test_a_stack_follows_the_number_of_tokens_and_the_caches_it_is_given() -> None:
    """One model, many shapes of steps, and two pools in turn: every program is built for what it runs on."""
    model = make_model()
    expected = logits(copy.deepcopy(model), TorchBackend())
    report = rewrite_model(model)
    assert report.counts["stacks"] == 1
    backend = CpuBackend()
    for _ in range(2):  # logits makes new caches every time
        assert torch.allclose(logits(model, backend), expected, atol=1e-4 * float(expected.abs().max()))
    assert torch.allclose(logits(model, TorchBackend()), expected, atol=1e-4 * float(expected.abs().max()))
