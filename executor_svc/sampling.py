"""From logits to tokens, for a whole batch at once. Knows tensors and sampling parameters; no sequences, no wire.

    bias -> suppression until min_tokens -> penalties -> (log probabilities) -> temperature -> top-k -> top-p -> min-p -> draw

Rows that ask for nothing cost nothing: a batch of greedy rows is one argmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_svc.core.sampling import PositionLogprobs, SamplingRow, TokenLogprob, uniform_draw

_NUM_CANDIDATES = 512
"""Most likely tokens that top-p looks at before it sorts the whole vocabulary, which is seldom needed and slow."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One entry per row.

    Attributes:
        token_ids: chosen ids; 0 where the row failed.
        logprobs: None where not asked for.
        errors: message by row, for rows without a choice.
    """

    token_ids: list[int]
    logprobs: list[PositionLogprobs | None]
    errors: dict[int, str]


class Sampler:
    """Chooses tokens. Keeps nothing between calls.

    Attributes:
        vocab_size: number of logits of a row.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampleResult:
        """Chooses one token per row.

        Args:
            logits: float32 [len(rows), vocab_size]; not changed.
            rows: one per row of logits.
        """
        if logits.shape != (len(rows), self.vocab_size):
            raise ValueError(f"logits: shape {tuple(logits.shape)}, expected {(len(rows), self.vocab_size)}")
        if not rows:
            return SampleResult([], [], {})
        logits = _edited(logits, rows)
        best_logits, best_ids = logits.max(dim=-1)
        token_ids: list[int] = best_ids.tolist()
        # The largest logit is a number unless the row holds a NaN or nothing but infinities.
        errors = {
            row: "the logits are not numbers, or every token is ruled out"
            for row, is_finite in enumerate(torch.isfinite(best_logits).tolist())
            if not is_finite
        }
        drawn = [row for row, asked in enumerate(rows) if not asked.params.is_greedy and row not in errors]
        if drawn:
            for row, token_id in zip(drawn, self._draw(_select(logits, drawn), [rows[row] for row in drawn]), strict=True):
                token_ids[row] = token_id
        for row in errors:
            token_ids[row] = 0
        return SampleResult(token_ids, _logprobs(logits, rows, token_ids, errors), errors)

    def _draw(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        """Inverse of the cumulative distribution, in order of token id, at each row's own uniform number."""
        temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32)
        scaled = logits - logits.amax(dim=-1, keepdim=True)
        scaled = scaled.div_(temperature[:, None])  # at most 0, so that a tiny temperature cannot overflow upwards
        filtered = [index for index, row in enumerate(rows) if row.params.has_filters]
        floor = torch.full((len(rows),), -torch.inf)
        if filtered:
            floor[filtered] = _lowest_kept(_select(scaled, filtered), [rows[index] for index in filtered])
        weights = (
            scaled.exp_().double() if not filtered else torch.where(scaled < floor[:, None], -torch.inf, scaled).exp_().double()
        )
        cumulative = weights.cumsum_(dim=-1)
        total = cumulative[:, -1:].contiguous()
        uniform = torch.tensor([[uniform_draw(row.params.seed, row.position)] for row in rows], dtype=torch.float64)
        chosen = torch.searchsorted(cumulative, uniform * total, right=True)
        last = torch.searchsorted(cumulative, total)  # where rounding carried the number to the very end
        ids: list[int] = torch.minimum(chosen, last)[:, 0].tolist()
        return ids


def _select(logits: Tensor, indices: list[int]) -> Tensor:
    """The rows of logits; itself if all are wanted."""
    return logits if len(indices) == logits.shape[0] else logits[indices]


def _edited(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits after bias, suppression and penalties; a copy if there is anything to do."""
    if not any(row.edits_logits for row in rows):
        return logits
    logits = logits.clone()
    _add_bias(logits, rows)
    _suppress(logits, rows)
    _penalise(logits, rows)
    return logits


def _add_bias(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = [(index, token, bias) for index, row in enumerate(rows) for token, bias in row.params.logit_bias.items()]
    if entries:
        at_row, at_token, values = zip(*entries, strict=True)
        logits.index_put_((torch.tensor(at_row), torch.tensor(at_token)), torch.tensor(values), accumulate=True)


def _suppress(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = [
        (index, token) for index, row in enumerate(rows) if row.suppresses for token in row.params.suppressed_until_min_tokens
    ]
    if entries:
        at_row, at_token = zip(*entries, strict=True)
        logits[torch.tensor(at_row), torch.tensor(at_token)] = -torch.inf


def _penalise(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Repetition penalty over prompt and output, then presence and frequency over the output."""
    for index, row in enumerate(rows):
        params = row.params
        if not params.has_penalties:
            continue
        token_ids = np.asarray(row.token_ids, dtype=np.int64)
        if params.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.unique(token_ids))
            values = logits[index, seen]
            logits[index, seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        output = token_ids[row.num_prompt_tokens :]
        if output.size and (params.presence_penalty or params.frequency_penalty):
            ids, counts = np.unique(output, return_counts=True)
            penalty = params.presence_penalty + params.frequency_penalty * counts
            logits[index, torch.from_numpy(ids)] -= torch.from_numpy(penalty).float()


def _lowest_kept(scaled: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Smallest logit of each row that top-k, top-p and min-p keep.

    Args:
        scaled: float32 [n, vocab_size], divided by temperature, the largest of a row 0.
        rows: n of them.

    Returns:
        float32 [n].
    """
    vocab_size = scaled.shape[1]
    top_k = torch.tensor([min(row.params.top_k, vocab_size) or vocab_size for row in rows])
    top_p = torch.tensor([row.params.top_p for row in rows], dtype=torch.float64)
    min_p = torch.tensor([row.params.min_p for row in rows], dtype=torch.float32)
    floor = torch.log(min_p)  # -inf where it is 0
    limited = top_k < vocab_size
    if not bool(limited.any()) and not bool((top_p < 1).any()):
        return floor
    most = int(top_k[limited].max()) if bool(limited.any()) else 0
    num_candidates = min(vocab_size, max(_NUM_CANDIDATES if bool((top_p < 1).any()) else 1, most))
    candidates = scaled.topk(num_candidates, dim=-1).values
    kth = torch.where(limited, candidates.gather(1, (top_k.clamp(max=num_candidates) - 1)[:, None])[:, 0], -torch.inf)
    floor = torch.maximum(floor, kth)
    nucleus = top_p < 1
    if bool(nucleus.any()):
        chosen = nucleus.nonzero()[:, 0]
        floor[chosen] = torch.maximum(
            floor[chosen], _nucleus_floor(scaled[chosen], candidates[chosen], kth[chosen], top_p[chosen])
        )
    return floor


def _nucleus_floor(scaled: Tensor, candidates: Tensor, kth: Tensor, top_p: Tensor) -> Tensor:
    """Smallest logit of each row's nucleus: the most likely tokens whose predecessors have less than top_p together.

    Args:
        scaled: float32 [n, vocab_size].
        candidates: float32 [n, m], the largest of scaled in descending order.
        kth: float32 [n], what top-k keeps at least; probabilities are those among the tokens that top-k keeps.
        top_p: float64 [n].

    Returns:
        float32 [n].
    """
    total = torch.where(scaled < kth[:, None], -torch.inf, scaled).exp_().sum(dim=-1, dtype=torch.float64)
    floor, ends_inside = _floor_among(candidates, kth, top_p * total)
    outside = (~ends_inside).nonzero()[:, 0]
    if outside.numel() and candidates.shape[1] < scaled.shape[1]:
        everything = scaled[outside].sort(dim=-1, descending=True).values
        floor[outside] = _floor_among(everything, kth[outside], (top_p * total)[outside])[0]
    return floor


def _floor_among(candidates: Tensor, kth: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest candidate kept by its predecessors' mass, and whether the nucleus ends among the candidates."""
    weights = torch.where(candidates < kth[:, None], -torch.inf, candidates).exp_().double()
    cumulative = weights.cumsum(dim=-1)
    num_kept = ((cumulative - weights) < mass[:, None]).sum(dim=-1).clamp(min=1)
    floor = candidates.gather(1, (num_kept - 1)[:, None])[:, 0]
    return floor, cumulative[:, -1] >= mass


def _logprobs(
    logits: Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int], errors: dict[int, str]
) -> list[PositionLogprobs | None]:
    """Log probabilities of the rows that ask for them."""
    found: list[PositionLogprobs | None] = [None] * len(rows)
    asking = [index for index, row in enumerate(rows) if row.params.num_logprobs is not None and index not in errors]
    if not asking:
        return found
    logprobs = _select(logits, asking).log_softmax(dim=-1)
    most = min(max(rows[index].params.num_logprobs or 0 for index in asking), logits.shape[1])
    values, ids = logprobs.topk(most, dim=-1)
    for at, index in enumerate(asking):
        num = min(rows[index].params.num_logprobs or 0, most)
        chosen = token_ids[index]
        top = zip(ids[at, :num].tolist(), values[at, :num].tolist(), strict=True)
        found[index] = PositionLogprobs(
            chosen=TokenLogprob(chosen, float(logprobs[at, chosen])),
            top=tuple(TokenLogprob(token_id, logprob) for token_id, logprob in top),
        )
    return found
