"""Models rewritten for a GPU compute what they computed before; here with plain torch functions, on the CPU."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.torch_backend import TorchBackend
from executor_svc.model.attention import ATTENTION_NAME, register_attention
from executor_svc.model.cuda_rewrite import rewrite_for_cuda
from executor_svc.model.forward_context import ForwardContext, use
from executor_svc.model.self_check import packed_batch
from executor_svc.model.stack_functions import TORCH_FUNCTIONS
from tests.unit.executor_svc.model.tiny import SERVED, STACKED, config_of, disturb_vectors

NUM_LAYERS, HEAD_DIM = 4, 16


def make_model(config: Any) -> Any:
    register_attention()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    disturb_vectors(model)
    model.set_attn_implementation(ATTENTION_NAME)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def logits(model: nn.Module) -> Tensor:
    """Two sequences, in chunks and then as decodes; logits of some tokens of each step."""
    config: Any = model.config
    shape = (4, config.num_key_value_heads, HEAD_DIM, 16)
    caches = [LayerCache(torch.zeros(shape), torch.zeros(shape).transpose(2, 3).contiguous()) for _ in range(NUM_LAYERS)]
    token_ids = [torch.arange(20) % 50 + 3, torch.arange(9) % 50 + 30]
    found = []
    for parts in ([(0, 0, 13), (1, 0, 8)], [(1, 8, 9), (0, 13, 19)], [(0, 19, 20)]):
        batch = packed_batch(parts, [[3, 1], [2]], block_size=16)
        ids = torch.cat([token_ids[seq][start:end] for seq, start, end in parts])
        positions = torch.cat([torch.arange(start, end) for _, start, end in parts])
        keep = torch.arange(0, len(ids), 2)
        with use(ForwardContext(batch, TorchBackend(), caches)):
            out = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep)
            found.append(out.logits[0].float())
    return torch.cat(found)


@pytest.mark.parametrize("many_tokens", [1, 1000])
@pytest.mark.parametrize("form", STACKED)
def test_logits_stay(form: str, many_tokens: int) -> None:
    model = make_model(STACKED[form]())
    before = logits(model)

    report = rewrite_for_cuda(model, functions=TORCH_FUNCTIONS)

    assert report.counts["stack"] == 1, str(report)
    model.forward.stack.many_tokens = many_tokens
    difference = (logits(model) - before).abs().max() / before.abs().max()
    assert difference < 1e-4


@pytest.mark.parametrize("form", ["llama", "qwen2"])
def test_merged_weights_are_held_once(form: str) -> None:
    model = make_model(STACKED[form]())
    before = sum(parameter.numel() for parameter in model.parameters())
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}

    report = rewrite_for_cuda(model, functions=TORCH_FUNCTIONS)

    storages = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage() for parameter in model.parameters()}
    assert sum(storage.nbytes() for storage in storages.values()) == 4 * before
    assert report.counts["merged projections"] == 2 * NUM_LAYERS
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "phi3_longrope"])
def test_other_forms_stay_and_say_why(family: str) -> None:
    register_attention()
    model = transformers.AutoModelForCausalLM.from_config(SERVED[family](), dtype=torch.float32)
    forward = model.forward
    weight = model.lm_head.weight.data_ptr()

    report = rewrite_for_cuda(model, functions=TORCH_FUNCTIONS)

    assert model.forward == forward
    assert not report.counts
    assert "stack left alone" in str(report)
    assert model.lm_head.weight.data_ptr() == weight


def test_an_activation_without_a_kernel_stays() -> None:
    report = rewrite_for_cuda(make_model(config_of("LlamaConfig", hidden_act="relu")), functions=TORCH_FUNCTIONS)
    assert "activation without a kernel" in report.skipped["stack"]


def test_int8_weights_stay() -> None:
    report = rewrite_for_cuda(make_model(config_of("LlamaConfig")), quantization="int8", functions=TORCH_FUNCTIONS)
    assert "int8" in report.skipped["stack"]


def test_a_rewritten_model_keeps_no_cache_of_its_own() -> None:
    model = make_model(config_of("LlamaConfig"))
    rewrite_for_cuda(model, functions=TORCH_FUNCTIONS)
    ids = torch.arange(3)[None]
    with pytest.raises(ValueError, match="paged cache only"):
        model(input_ids=ids, position_ids=ids, use_cache=True)
