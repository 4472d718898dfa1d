"""Loading: what a folder becomes, what is refused, and that nothing is left to chance."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.block_hash import kv_fingerprint
from common.errors import ModelRefused, StartupError
from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.torch_backend import TorchBackend
from executor_svc.model import forward_context
from executor_svc.model.attention import paged_attention_forward
from executor_svc.model.load import LoadedModel, load_model
from executor_svc.model.random_weights import build_random
from executor_svc.model.self_check import packed_batch
from tests.unit.executor_svc.model.tiny import MOE, SERVED, config_of, paged_logits, save_config


def save_model(config: Any, folder: Path, seed: int = 1) -> Path:
    """A folder with a config and random weights."""
    with torch.no_grad():
        model: Any = build_random(config, torch.float32, seed)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(folder, backend=TorchBackend(), **options)


def test_saved_weights_are_those_that_are_served(tmp_path: Path) -> None:
    folder = save_model(SERVED["llama"](), tmp_path)
    ids = torch.arange(1, 30)
    with torch.no_grad():
        module: Any = build_random(SERVED["llama"](), torch.float32, 1)
        wanted = module.eval()(input_ids=ids[None], use_cache=False).logits[0]
    model = load(folder)
    torch.testing.assert_close(paged_logits(model, TorchBackend(), [ids], [[20], [9]])[0], wanted, rtol=0, atol=1e-3)


def test_experts_saved_one_by_one_are_found(tmp_path: Path) -> None:
    folder = save_model(config_of("Qwen3MoeConfig", head_dim=16, **MOE), tmp_path)
    assert any("experts.0." in name for name in load_file(folder / "model.safetensors"))
    assert len(load(folder).layer_specs) == 4


def test_model_is_frozen_and_in_eval_mode(tmp_path: Path) -> None:
    module = load(save_model(SERVED["llama"](), tmp_path)).module
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_digest_follows_the_weights(tmp_path: Path) -> None:
    one, same, other = (
        load(save_model(SERVED["llama"](), tmp_path / name, seed)) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert len(one.weights_digest) == 32
    assert one.weights_digest == same.weights_digest
    assert one.weights_digest != other.weights_digest
    assert kv_fingerprint(one.fingerprint_parts) == kv_fingerprint(same.fingerprint_parts)
    assert kv_fingerprint(one.fingerprint_parts) != kv_fingerprint(other.fingerprint_parts)


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    folder = save_config(SERVED["gemma3"](), tmp_path)
    one, same, other = (load(folder, load_format="random", seed=seed) for seed in (1, 1, 2))
    assert one.weights_digest == same.weights_digest != other.weights_digest
    ids = torch.arange(20)
    logits = [paged_logits(model, TorchBackend(), [ids], [[20]])[0] for model in (one, same, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert torch.isfinite(logits[0]).all()


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    folder = save_model(config_of("LlamaConfig", initializer_range=0.1), tmp_path)
    full, half = load(folder), load(folder, dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in half.module.parameters()} == {torch.bfloat16}
    ids = torch.arange(1, 40)
    wanted = paged_logits(full, TorchBackend(), [ids], [[39]])[0]
    found = paged_logits(half, TorchBackend(), [ids], [[39]])[0]
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 5e-2
    assert full.fingerprint_parts["dtype"] != half.fingerprint_parts["dtype"]


def test_int8_is_close_and_small(tmp_path: Path) -> None:
    folder = save_model(config_of("LlamaConfig", initializer_range=0.1), tmp_path)
    full, small = load(folder), load(folder, quantization="int8")
    ids = torch.arange(1, 40)
    wanted = paged_logits(full, TorchBackend(), [ids], [[39]])[0]
    found = paged_logits(small, TorchBackend(), [ids], [[20], [19]])[0]
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 5e-2
    assert not torch.equal(found, wanted)
    assert full.fingerprint_parts["quantization"] != small.fingerprint_parts["quantization"]


def test_end_of_text_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    folder = save_model(SERVED["llama"](), tmp_path)
    assert load(folder).eos_token_ids == {2}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert load(folder).eos_token_ids == {3, 5}


def test_sample_indices_select_rows(tmp_path: Path) -> None:
    model = load(save_model(SERVED["llama"](), tmp_path))
    ids = torch.arange(6)
    rows = []
    for indices in (torch.arange(6), torch.tensor([5, 2]), torch.tensor([], dtype=torch.int64)):
        caches = [LayerCache(torch.zeros(1, 2, 16, 16), torch.zeros(1, 2, 16, 16)) for _ in range(4)]
        context = forward_context.ForwardContext(packed_batch([(0, 0, 6)], [[0]], block_size=16), TorchBackend(), caches)
        rows.append(model.compute_logits(context, ids, ids, indices))
    torch.testing.assert_close(rows[1], rows[0][[5, 2]])
    assert rows[2].shape == (0, model.vocab_size)


def test_context_can_be_shortened_but_not_stretched(tmp_path: Path) -> None:
    folder = save_model(SERVED["llama"](), tmp_path)
    assert load(folder).max_model_len == 512
    assert load(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(StartupError, match=r"max_model_len: 513 is out of range 1\.\.512"):
        load(folder, max_model_len=513)


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"has no config\.json"):
        load(tmp_path)


def test_config_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_family"}')
    with pytest.raises(StartupError, match="no model config that transformers"):
        load(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="has no weights"):
        load(save_config(SERVED["llama"](), tmp_path))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (
            lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"),
            "lacks 1 of the model's weights, first model.layers.1.mlp.up_proj",
        ),
        (lambda weights: weights.update({"model.norm.weight": torch.zeros(3)}), "size|shape|mismatch"),
        (lambda weights: weights["model.norm.weight"].fill_(torch.nan), "NaN"),
    ],
    ids=["missing", "wrong shape", "nan"],
)
def test_damaged_weights_are_refused(damage: Callable[[dict[str, Tensor]], object], reason: str, tmp_path: Path) -> None:
    folder = save_model(SERVED["llama"](), tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    damage(weights)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises((ModelRefused, StartupError), match=reason):
        load(folder)


def test_attention_outside_a_context_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="outside a forward context"):
        forward_context.current()


@pytest.mark.parametrize("extra", [{"position_bias": torch.zeros(1)}, {"attention_mask": torch.zeros(1)}, {"dropout": 0.1}])
def test_attention_refuses_what_it_would_lose(extra: dict[str, Any]) -> None:
    module = torch.nn.Module()
    module.__dict__["layer_idx"] = 0
    heads = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=next(iter(extra)).replace("_", ".")):
        paged_attention_forward(module, heads, heads, heads, **{"attention_mask": None, **extra})
