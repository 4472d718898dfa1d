"""Every family that is promised computes through the paged cache what it computes by itself; the others are refused."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import ModelRefused
from executor_svc.kernels.cpu.backend import CpuBackend
from executor_svc.kernels.torch_backend import TorchBackend
from executor_svc.model.load import load_model
from executor_svc.model.random_weights import build_random
from tests.unit.executor_svc.model.tiny import MOE, SERVED, config_of, paged_logits, save_config

BACKENDS = [TorchBackend, CpuBackend]
LENS = (45, 5, 20, 33)
CHUNKS = ((11, 4, 0, 17), (7, 1, 16, 0), (1, 0, 1, 15), (25, 0, 1, 1), (1, 0, 2, 0))
"""Packed prefill chunks, mixed with decodes, of sequences longer than the windows; one step brings up the tail of each."""
SEED = 7


def eager_logits(config: Any, token_ids: Sequence[Tensor]) -> list[Tensor]:
    """What transformers computes by itself, one sequence at a time, without a cache."""
    with torch.no_grad():
        module: Any = build_random(config, torch.float32, SEED)
        module.eval()
        return [module(input_ids=ids[None], use_cache=False).logits[0] for ids in token_ids]


def random_sequences(lens: Sequence[int], vocab_size: int = 128) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lens]


def assert_same_logits(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    scale = max(float(rows.abs().max()) for rows in wanted)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("backend_class", BACKENDS)
@pytest.mark.parametrize("family", SERVED)
def test_families_equal_their_own_eager_forward(family: str, backend_class: type, tmp_path: Path) -> None:
    config = SERVED[family]()
    token_ids = random_sequences(LENS)
    wanted = eager_logits(config, token_ids)
    backend = backend_class()
    model = load_model(
        save_config(SERVED[family](), tmp_path), load_format="random", seed=SEED, backend=backend, max_model_len=64
    )
    assert_same_logits(paged_logits(model, backend, token_ids, CHUNKS), wanted)


def test_families_with_windows_are_traced_per_layer(tmp_path: Path) -> None:
    folder = save_config(SERVED["qwen2_window"](), tmp_path)
    specs = load_model(folder, load_format="random", backend=TorchBackend()).layer_specs
    assert [spec.window for spec in specs] == [None, None, 9, 9]


def test_families_with_unequal_heads_are_traced(tmp_path: Path) -> None:
    specs = load_model(save_config(SERVED["deepseek_v3"](), tmp_path), load_format="random", backend=TorchBackend()).layer_specs
    assert {(spec.num_kv_heads, spec.head_dim_k, spec.head_dim_v) for spec in specs} == {(4, 24, 12)}


def test_families_longrope_serves_its_original_length_unless_asked(tmp_path: Path) -> None:
    folder = save_config(SERVED["phi3_longrope"](), tmp_path)
    assert load_model(folder, load_format="random", backend=TorchBackend()).max_model_len == 32


LLAMA4 = {
    "head_dim": 16,
    "num_local_experts": 2,
    "intermediate_size_mlp": 96,
    "attention_chunk_size": 16,
    "floor_scale": 17,
    "interleave_moe_layer_step": 2,
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "bert": (lambda: config_of("BertConfig"), "bert: BertSelfAttention is not causal"),
    "bert_masked": (lambda: config_of("BertConfig", architectures=["BertForMaskedLM"]), "BertForMaskedLM"),
    "falcon": (
        lambda: config_of("FalconConfig", num_kv_heads=2, new_decoder_architecture=True),
        "falcon does not use transformers' attention interface: attention ran 0 times for 4 layers",
    ),
    "mamba": (lambda: config_of("MambaConfig"), "mamba has layers of type linear_attention"),
    "llama4": (lambda: config_of("Llama4TextConfig", **LLAMA4), "at most 16 instead of 512"),
    "bloom": (lambda: config_of("BloomConfig", n_layer=2, n_head=4), "bloom does not use transformers' attention interface"),
    "qwen3_next": (lambda: config_of("Qwen3NextConfig", head_dim=16, **MOE), "linear_attention"),
    "t5": (lambda: config_of("T5Config", num_layers=2, num_heads=4, d_kv=16), "encoder-decoder"),
    "diffllama": (lambda: config_of("DiffLlamaConfig"), "attention ran 8 times in 4 layers"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_cannot_be_paged_are_refused_with_the_reason(family: str, tmp_path: Path) -> None:
    make_config, reason = REFUSED[family]
    with pytest.raises(ModelRefused, match=reason):
        load_model(save_config(make_config(), tmp_path), load_format="random", backend=TorchBackend())


def test_families_llama4_within_its_chunk_is_served(tmp_path: Path) -> None:
    config = config_of("Llama4TextConfig", **LLAMA4)
    token_ids = random_sequences((16, 9))
    wanted = eager_logits(config, token_ids)
    backend = TorchBackend()
    folder = save_config(config_of("Llama4TextConfig", **LLAMA4), tmp_path)
    model = load_model(folder, load_format="random", seed=SEED, backend=backend, max_model_len=16)
    assert_same_logits(paged_logits(model, backend, token_ids, ((13, 7), (2, 1), (1, 1))), wanted)


class _WindowBlindBackend(TorchBackend):
    """Attention that forgets the window."""

    def paged_attention(self, *args: Any, window: int | None, **kwargs: Any) -> Tensor:
        return super().paged_attention(*args, window=None, **kwargs)


def test_families_self_check_notices_a_lost_window(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="differ from the model's own"):
        load_model(save_config(SERVED["gemma2"](), tmp_path), load_format="random", backend=_WindowBlindBackend())
