"""The sampler against transformers' own logits processors, and its promises about seeds, batches and bad rows."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from executor_svc.core.sampling import SamplingParams, SamplingRow, uniform_draw
from executor_svc.sampling import Sampler

VOCAB_SIZE = 1000
PINNED = [0.6524484863740322, 0.36818951565166946, 0.49050645623222144]


def make_logits(num_rows: int, *, vocab_size: int = VOCAB_SIZE, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def make_row(*, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), np.array([*prompt, *output], dtype=np.int32), len(prompt))


def drawn_ids(logits: torch.Tensor, num_draws: int, **params: Any) -> list[int]:
    """Tokens of many seeds from one row of logits [vocab_size]."""
    rows = [make_row(seed=seed, **params) for seed in range(num_draws)]
    result = Sampler(logits.shape[0]).sample(logits.expand(num_draws, -1), rows)
    assert result.errors == {}
    return result.token_ids


def assert_distribution(ids: list[int], probabilities: torch.Tensor) -> None:
    """Chi-square of the ids against probabilities [vocab_size]; rare tokens are taken together."""
    expected = probabilities.double().numpy() * len(ids)
    counts = np.bincount(ids, minlength=len(expected)).astype(np.float64)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    pairs = [*zip(counts[common], expected[common], strict=True), (counts[~common].sum(), expected[~common].sum())]
    statistic = sum((count - mean) ** 2 / mean for count, mean in pairs if mean > 0)
    degrees = len(pairs) - 1
    assert statistic < degrees + 4 * math.sqrt(2 * degrees) + 4


def test_greedy_batch_takes_the_most_likely() -> None:
    logits = make_logits(5)
    assert Sampler(VOCAB_SIZE).sample(logits, [make_row(temperature=0.0)] * 5).token_ids == logits.argmax(dim=-1).tolist()


def test_greedy_tie_goes_to_the_lowest_id() -> None:
    for vocab_size in (7, 1000, 49152):
        logits = torch.zeros(3, vocab_size)
        logits[1, vocab_size // 2 :] = 1.0
        logits[2, [vocab_size - 1, 3]] = 1.0
        ids = Sampler(vocab_size).sample(logits, [make_row(temperature=0.0)] * 3).token_ids
        assert ids == [0, vocab_size // 2, 3]


def test_logits_are_not_changed() -> None:
    logits = make_logits(2)
    before = logits.clone()
    Sampler(VOCAB_SIZE).sample(logits, [make_row(logit_bias={3: 5.0}, top_p=0.5), make_row(top_k=5, num_logprobs=2)])
    assert torch.equal(logits, before)


def test_temperature_draws_from_the_softmax() -> None:
    logits = make_logits(1, vocab_size=50)[0]
    assert_distribution(drawn_ids(logits, 8_000, temperature=0.7), torch.softmax(logits / 0.7, dim=-1))


def test_tiny_temperature_is_greedy() -> None:
    logits = make_logits(1)[0]
    assert set(drawn_ids(logits, 50, temperature=1e-7)) == {int(logits.argmax())}


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"top_k": 20, "top_p": 0.8}, [TopKLogitsWarper(20), TopPLogitsWarper(0.8)]),
        ({"top_k": 20, "top_p": 0.9, "min_p": 0.05}, [TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)]),
        ({"top_k": 5000}, []),
    ],
    ids=["top_k", "top_p", "min_p", "top_k_and_top_p", "all", "top_k_beyond_the_vocabulary"],
)
def test_filters_keep_what_transformers_keeps(params: dict[str, Any], warpers: list[Any]) -> None:
    logits = make_logits(1, vocab_size=200)[0]
    scores = TemperatureLogitsWarper(1.3)(None, logits[None].clone())
    for warper in warpers:
        scores = warper(None, scores)
    assert_distribution(drawn_ids(logits, 8_000, temperature=1.3, **params), torch.softmax(scores[0], dim=-1))


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_nucleus_may_be_larger_than_the_candidates(spread: float) -> None:
    logits = make_logits(1, vocab_size=5000, spread=spread)[0]
    kept = TopPLogitsWarper(0.5)(None, logits[None].clone())[0]
    ids = set(drawn_ids(logits, 2000, top_p=0.5))
    assert all(torch.isfinite(kept[token]) for token in ids)
    assert len(ids) > min(500, int(torch.isfinite(kept).sum()) // 2)


def test_top_p_of_nearly_nothing_is_greedy() -> None:
    logits = make_logits(1)[0]
    assert set(drawn_ids(logits, 50, top_p=1e-6)) == {int(logits.argmax())}


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = make_logits(1)
    row = make_row(prompt=(5, 9, 9), output=(7, 5), temperature=0.0, repetition_penalty=1.7, num_logprobs=VOCAB_SIZE)
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[5, 9, 9, 7, 5]]), logits.clone()).log_softmax(dim=-1)[0]
    assert_logprobs(logits, row, wanted)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = make_logits(1)
    row = make_row(
        prompt=(5, 9), output=(7, 7, 3), temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, num_logprobs=VOCAB_SIZE
    )
    edited = logits[0].clone()
    edited[7] -= 0.5 + 2 * 0.25
    edited[3] -= 0.5 + 0.25
    assert_logprobs(logits, row, edited.log_softmax(dim=-1))


def assert_logprobs(logits: torch.Tensor, row: SamplingRow, wanted: torch.Tensor) -> None:
    """All log probabilities of one row [vocab_size]."""
    result = Sampler(VOCAB_SIZE).sample(logits, [row])
    found = result.logprobs[0]
    assert found is not None
    by_id = {entry.token_id: entry.logprob for entry in found.top}
    torch.testing.assert_close(torch.tensor([by_id[i] for i in range(VOCAB_SIZE)]), wanted)
    assert result.token_ids == [int(wanted.argmax())]


def test_bias_is_added_before_everything() -> None:
    logits = make_logits(2)
    rows = [make_row(temperature=0.0, logit_bias={17: 100.0}, num_logprobs=1), make_row(temperature=0.0)]
    result = Sampler(VOCAB_SIZE).sample(logits, rows)
    assert result.token_ids == [17, int(logits[1].argmax())]
    assert result.logprobs[0] is not None
    assert result.logprobs[0].chosen.logprob == pytest.approx(0.0, abs=1e-6)


def test_suppressed_ids_wait_for_min_tokens() -> None:
    logits = make_logits(1)
    best, second = logits[0].topk(2).indices.tolist()
    for output, wanted in (((4,), second), ((4, 4), best)):
        row = make_row(output=output, temperature=0.0, min_tokens=2, suppressed_until_min_tokens=frozenset({best}))
        assert Sampler(VOCAB_SIZE).sample(logits, [row]).token_ids == [wanted]


def test_logprobs_are_taken_at_temperature_one_before_filters() -> None:
    logits = make_logits(1)
    row = make_row(temperature=0.3, top_k=3, num_logprobs=5)
    result = Sampler(VOCAB_SIZE).sample(logits, [row])
    found, wanted = result.logprobs[0], logits[0].log_softmax(dim=-1)
    assert found is not None
    assert [entry.token_id for entry in found.top] == wanted.topk(5).indices.tolist()
    assert found.chosen.token_id == result.token_ids[0]
    assert found.chosen.logprob == pytest.approx(float(wanted[result.token_ids[0]]))


def test_zero_logprobs_are_of_the_chosen_token_only() -> None:
    found = Sampler(VOCAB_SIZE).sample(make_logits(1), [make_row(num_logprobs=0)]).logprobs[0]
    assert found is not None
    assert found.top == ()


def test_token_depends_on_seed_and_position_only() -> None:
    logits = make_logits(4)
    rows = [make_row(seed=11, output=(1, 2)), make_row(temperature=0.0), make_row(seed=11, top_p=0.9), make_row(seed=5, top_k=9)]
    together = Sampler(VOCAB_SIZE).sample(logits, rows).token_ids
    alone = [Sampler(VOCAB_SIZE).sample(logits[i : i + 1], [row]).token_ids[0] for i, row in enumerate(rows)]
    reverse = Sampler(VOCAB_SIZE).sample(logits.flip(0), rows[::-1]).token_ids[::-1]
    assert together == alone == reverse


def test_bad_rows_fail_alone() -> None:
    logits = make_logits(4)
    logits[0, 3] = torch.nan
    logits[1] = -torch.inf
    logits[3, 5] = torch.inf
    good = make_row(seed=3, num_logprobs=1)
    result = Sampler(VOCAB_SIZE).sample(logits, [make_row(temperature=0.0), make_row(), good, make_row(num_logprobs=1)])
    assert sorted(result.errors) == [0, 1, 3]
    assert result.token_ids[2] == Sampler(VOCAB_SIZE).sample(logits[2:3], [good]).token_ids[0]
    assert result.logprobs[2] is not None


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 100), -torch.inf)
    logits[0, [0, 42, 99]] = torch.tensor([0.0, 1.0, 2.0])
    assert set(drawn_ids(logits[0], 300)) == {0, 42, 99}


def test_no_rows_give_no_tokens() -> None:
    assert Sampler(VOCAB_SIZE).sample(torch.empty(0, VOCAB_SIZE), []).token_ids == []


@settings(max_examples=50)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_uniform_draws_are_below_one_and_repeat(seed: int, position: int) -> None:
    number = uniform_draw(seed, position)
    assert 0.0 <= number < 1.0
    assert number == uniform_draw(seed, position)


def test_uniform_draws_are_pinned() -> None:
    assert [uniform_draw(0, 0), uniform_draw(1, 0), uniform_draw(0, 1)] == PINNED


def test_uniform_draws_of_neighbours_are_unrelated() -> None:
    numbers = np.array([[uniform_draw(seed, position) for position in range(100)] for seed in range(100)])
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert abs(counts - 500).max() < 110
    for other in (numbers[1:, :] * numbers[:-1, :], numbers[:, 1:] * numbers[:, :-1]):
        assert other.mean() == pytest.approx(0.25, abs=0.01)
