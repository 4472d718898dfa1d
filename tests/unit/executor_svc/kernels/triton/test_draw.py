"""Draws in Triton's interpreter against the CPU's: the same token for the same number."""

import numpy as np
import pytest
import torch

from executor_svc.core.sampling import SamplingParams
from executor_svc.core.sampling_draw import draw_token
from executor_svc.kernels.triton.draw import draw

VOCAB = 200
FILTERS = {
    "none": SamplingParams(temperature=1.0),
    "top-k": SamplingParams(temperature=0.7, top_k=9),
    "top-p": SamplingParams(temperature=1.3, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05),
    "all": SamplingParams(temperature=2.0, top_k=40, top_p=0.9, min_p=0.02),
    "top-k of one": SamplingParams(temperature=1.0, top_k=1),
    "top-k beyond the vocabulary": SamplingParams(temperature=1.0, top_k=VOCAB + 5),
    "a tiny temperature": SamplingParams(temperature=1e-4, top_p=0.5),
}


def draw_all(logits: torch.Tensor, params: list[SamplingParams], uniform: list[float], *, candidates: int) -> list[int]:
    tokens = draw(
        logits,
        torch.tensor([row.temperature for row in params], dtype=torch.float32),
        torch.tensor([row.top_p for row in params], dtype=torch.float32),
        torch.tensor([row.min_p for row in params], dtype=torch.float32),
        torch.tensor([row.top_k for row in params], dtype=torch.int32),
        torch.tensor(uniform, dtype=torch.float64),
        block=64,
        candidates=candidates,
    )
    found: list[int] = tokens.tolist()
    return found


@pytest.mark.parametrize("candidates", [256, 8])
@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_tokens_are_those_that_the_cpu_draws(candidates: int, spread: float) -> None:
    """With room for all likely tokens, and with too little, where the whole row is searched."""
    logits = torch.randn(len(FILTERS), VOCAB, generator=torch.Generator().manual_seed(3)) * spread
    params = list(FILTERS.values())
    for uniform in (0.0, 0.31, 0.77, 0.999999):
        expected = [draw_token(logits[row].numpy(), params[row], uniform) for row in range(len(FILTERS))]
        assert draw_all(logits, params, [uniform] * len(params), candidates=candidates) == expected


def test_ties_are_kept_whole() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 50:60] = 5.0
    tokens = {
        draw_all(logits, [SamplingParams(temperature=1.0, top_k=3)], [float(u)], candidates=256)[0]
        for u in np.linspace(0, 0.999, 23)
    }
    assert tokens == set(range(50, 60))


def test_tokens_that_are_ruled_out_are_never_drawn_and_greedy_rows_are_left_alone() -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, 120:123] = 1.0
    params = [SamplingParams(temperature=1.0, top_k=50), SamplingParams(temperature=0.0)]
    assert draw_all(logits, params, [0.999999, 0.5], candidates=256) == [122, 0]
