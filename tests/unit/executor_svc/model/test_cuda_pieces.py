"""Pieces compute what the stack computes layer by layer, with padding and without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.layout import KEYS_AS_COLUMNS
from executor_svc.kernels.torch_backend import TorchBackend
from executor_svc.model.cuda_pieces import LayerPieces, buffer_bytes, most_tokens_worth, sizes
from executor_svc.model.cuda_rewrite import rewrite_for_cuda
from executor_svc.model.stack_functions import TORCH_FUNCTIONS
from tests.unit.executor_svc.model.piece_steps import logits_of, poisoned_caches, steps_of
from tests.unit.executor_svc.model.test_cuda_rewrite import make_model
from tests.unit.executor_svc.model.tiny import STACKED

CPU = torch.device("cpu")
NUM_LAYERS = 3
STEPS = steps_of([9, 6, 24])


class Now:
    """Takes work down by remembering it."""

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return work, work()


class Counted:
    """Pieces that count the steps they took."""

    def __init__(self, pieces: LayerPieces):
        self.num_steps = 0
        self._pieces = pieces

    def forward(self, *arguments: Any) -> Any:
        out = self._pieces.forward(*arguments)
        self.num_steps += out is not None
        return out


def caches_of(model: Any) -> dict[int, LayerCache]:
    return poisoned_caches(model.config, NUM_LAYERS, torch.float32, CPU, KEYS_AS_COLUMNS)


@pytest.fixture
def stacked(request: pytest.FixtureRequest) -> Any:
    config = STACKED[request.param]()
    config.num_hidden_layers = NUM_LAYERS
    model = make_model(config)
    rewrite_for_cuda(model, functions=TORCH_FUNCTIONS)
    model.forward.stack.trimmed_tokens = 1
    return model


@pytest.mark.parametrize("many_tokens", [1, 1000])
@pytest.mark.parametrize("stacked", ["llama", "qwen3", "gemma3"], indirect=True)
def test_logits_are_those_of_the_stack(stacked: Any, many_tokens: int) -> None:
    stack = stacked.forward.stack
    stack.many_tokens = many_tokens
    expected = logits_of(stacked, caches_of(stacked), STEPS, TorchBackend())
    caches = caches_of(stacked)
    stack.pieces = LayerPieces(stack, caches, 48)
    stack.pieces.capture(Now(), [32, 48])
    counted = stack.pieces = Counted(stack.pieces)

    found = logits_of(stacked, caches, STEPS, TorchBackend())

    assert counted.num_steps == len(STEPS)
    assert (found - expected).abs().max() / expected.abs().max() < 1e-5


@pytest.mark.parametrize("stacked", ["llama"], indirect=True)
def test_a_step_without_pieces_goes_layer_by_layer(stacked: Any) -> None:
    stack = stacked.forward.stack
    caches = caches_of(stacked)
    expected = logits_of(stacked, caches, STEPS, TorchBackend())
    stack.pieces = LayerPieces(stack, caches, 16)
    stack.pieces.capture(Now(), [8, 16])

    assert torch.equal(logits_of(stacked, caches, STEPS, TorchBackend()), expected)
    stack.pieces = LayerPieces(stack, caches, 48)
    stack.pieces.capture(Now(), [48])
    others = caches_of(stacked)
    assert torch.equal(logits_of(stacked, others, STEPS, TorchBackend()), expected), (
        "pieces write to the pool that they were made for"
    )


def test_sizes_are_fine_where_few_tokens_are_many() -> None:
    assert sizes(1024, 8192)[:4] == [1280, 1536, 1792, 2048]
    assert sizes(1024, 8192)[-2:] == [7680, 8192]
    assert sizes(1024, 1000) == []
    assert sizes(0, 300) == [256]


@pytest.mark.parametrize("stacked", ["llama"], indirect=True)
def test_the_smaller_the_model_the_more_tokens_are_worth_it(stacked: Any) -> None:
    layers = stacked.forward.stack.layers
    weights = sum(p.weight.numel() for part in layers for p in (part.qkv, part.output, part.gate_up, part.down))
    assert most_tokens_worth(layers) == int(len(layers) * 0.6e-3 * 600e12 / (2 * weights))
    assert buffer_bytes(layers[0], 2048) > 2048 * layers[0].qkv.weight.shape[1] * 4
