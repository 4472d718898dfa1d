"""Weights in 8 bits: how near they are, what they cost, and that the default model still says the same."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn

from executor_svc.kernels.cpu.backend import CpuBackend
from executor_svc.model.load import Quantization, load_model
from executor_svc.model.quantize import GROUP_SIZE, Int8Embedding, Int8Linear, quantize_model, quantize_weight
from tests.unit.executor_svc.model.tiny import paged_logits

TEXT = (
    "A lighthouse keeper wrote down the weather every morning. On the first of March 1987 the wind came from the north, and two "
    "fishing boats stayed in the harbour until noon. He noted their names, the height of the waves, and the time at which the "
    "fog lifted. Years later a student of meteorology found the notebooks in a library. She compared 3,650 entries with the "
    "records of the nearest station and discovered that the keeper had been right about the storms more often than the official "
    "forecast. In her thesis she explained why: he watched the birds. When the gulls left the rocks before sunrise, a storm "
    "followed within 12 hours in nine of ten cases. The committee asked whether birds could be used as sensors, and she answered "
    "that they already were.\n\nWhat is a cache? A cache is a small and fast memory that keeps copies of things that were needed "
    "recently, because they are likely to be needed again soon. When the cache is full, something must leave. The simplest rule "
    "is to drop what has not been used for the longest time. Other rules count how often each item is used, or try to guess the "
    "future from the past. No rule is best for every program, and measuring is the only way to know.\n\nTo make bread, mix 500 "
    "grams of flour with 350 grams of water, 10 grams of salt and a little yeast. Knead the dough for ten minutes, cover it with "
    "a cloth, and let it rest in a warm place until it has doubled in size. Shape it into a loaf, wait another hour, and bake it "
    "at 230 degrees for about 35 minutes. The bread is ready when it sounds hollow if you knock on its bottom."
)


@pytest.mark.parametrize("in_features", [1, 31, 32, 100, 576])
def test_values_are_the_nearest(in_features: int) -> None:
    weight = torch.randn(7, in_features, generator=torch.Generator().manual_seed(0))
    quantized = quantize_weight(weight)
    assert quantized.values.shape == weight.shape
    assert quantized.scales.shape == (7, -(-in_features // GROUP_SIZE))
    error = (quantized.dequantized() - weight).abs()
    assert bool((error <= quantized.scales.repeat_interleave(GROUP_SIZE, dim=1)[:, :in_features] * 0.5001).all())


def test_zero_and_large_weights_survive() -> None:
    weight = torch.zeros(2, 64)
    weight[0, 40] = 1e30
    assert torch.allclose(quantize_weight(weight).dequantized(), weight)


def test_memory_is_little_more_than_a_quarter_of_float32() -> None:
    weight = torch.randn(64, 576)
    assert quantize_weight(weight).num_bytes < 0.3 * weight.nbytes


@torch.inference_mode()
def test_linear_layer_with_bias() -> None:
    model = nn.Sequential(nn.Linear(100, 30))
    x = torch.randn(2, 5, 100, generator=torch.Generator().manual_seed(0))
    wanted = model(x)
    assert quantize_model(model) == 1
    assert float((model(x) - wanted).abs().max()) < 0.02 * float(wanted.abs().max())


@torch.inference_mode()
def test_shared_weights_stay_shared() -> None:
    embed, head = nn.Embedding(10, 32), nn.Linear(32, 10, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, head)
    ids = torch.tensor([[3, 9, 3]])
    wanted = model(ids)
    assert quantize_model(model) == 2
    first, second = model
    assert isinstance(first, Int8Embedding)
    assert isinstance(second, Int8Linear)
    assert first.values.data_ptr() == second.values.data_ptr()
    assert float((model(ids) - wanted).abs().max()) < 0.03 * float(wanted.abs().max())


class _ScaledEmbedding(nn.Embedding):
    """An embedding that computes something else."""

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(token_ids) * 2


def test_subclasses_and_what_they_share_are_left_alone() -> None:
    embed, head = _ScaledEmbedding(10, 32), nn.Linear(32, 10, bias=False)
    head.weight = embed.weight
    assert quantize_model(nn.Sequential(embed, nn.Linear(32, 32), head)) == 1


@pytest.mark.slow
def test_default_model_keeps_its_most_likely_tokens(default_model_folder: Path) -> None:
    ids = torch.tensor(Tokenizer.from_file(str(default_model_folder / "tokenizer.json")).encode(TEXT).ids)
    backend = CpuBackend()
    choices, num_bytes = [], []
    formats: tuple[Quantization, ...] = ("none", "int8")
    for quantization in formats:
        model = load_model(default_model_folder, quantization=quantization, backend=backend)
        choices.append(paged_logits(model, backend, [ids], [[len(ids)]])[0].argmax(dim=-1))
        num_bytes.append(sum(tensor.nbytes for tensor in (*model.module.parameters(), *model.module.buffers())))
    assert float((choices[0] == choices[1]).float().mean()) >= 0.97
    assert num_bytes[1] < 0.3 * num_bytes[0]
