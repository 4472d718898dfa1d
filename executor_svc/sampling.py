"""From logits to tokens, for a whole batch at once. Knows tensors and sampling parameters; no sequences, no wire.

    bias -> suppression until min_tokens -> penalties -> (log probabilities) -> temperature -> top-k -> top-p -> min-p -> draw

Rows that ask for nothing cost nothing: a batch of greedy rows is one argmax. core/sampling_draw.py draws from a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_svc.core.sampling import PositionLogprobs, SamplingRow, TokenLogprob, uniform_draw
from executor_svc.core.sampling_draw import draw_token


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
        logits = edit_logits(logits, rows)
        best_logits, best_ids = logits.max(dim=-1)
        token_ids: list[int] = best_ids.tolist()
        # The largest logit is a number unless the row holds a NaN or nothing but infinities.
        errors = {
            row: "the logits are not numbers, or every token is ruled out"
            for row, is_finite in enumerate(torch.isfinite(best_logits).tolist())
            if not is_finite
        }
        for index, row in enumerate(rows):
            if not row.params.is_greedy and index not in errors:
                uniform = uniform_draw(row.params.seed, row.position)
                token_ids[index] = draw_token(logits[index].numpy(), row.params, uniform)
        for failed in errors:
            token_ids[failed] = 0
        return SampleResult(token_ids, _logprobs(logits, rows, token_ids, errors), errors)


def _select(logits: Tensor, indices: list[int]) -> Tensor:
    """The rows of logits; itself if all are wanted."""
    return logits if len(indices) == logits.shape[0] else logits[indices]


def edit_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits float32 [len(rows), vocab_size] after bias, suppression and penalties; a copy if there is anything to do."""
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
        at = (torch.tensor(at_row, device=logits.device), torch.tensor(at_token, device=logits.device))
        logits.index_put_(at, torch.tensor(values, device=logits.device), accumulate=True)


def _suppress(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = [
        (index, token) for index, row in enumerate(rows) if row.suppresses for token in row.params.suppressed_until_min_tokens
    ]
    if entries:
        at_row, at_token = zip(*entries, strict=True)
        logits[torch.tensor(at_row, device=logits.device), torch.tensor(at_token, device=logits.device)] = -torch.inf


def _penalise(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Repetition penalty over prompt and output, then presence and frequency over the output."""
    for index, row in enumerate(rows):
        params = row.params
        if not params.has_penalties:
            continue
        token_ids = np.asarray(row.token_ids, dtype=np.int64)
        if params.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.unique(token_ids)).to(logits.device)
            values = logits[index, seen]
            logits[index, seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        output = token_ids[row.num_prompt_tokens :]
        if output.size and (params.presence_penalty or params.frequency_penalty):
            ids, counts = np.unique(output, return_counts=True)
            penalty = params.presence_penalty + params.frequency_penalty * counts
            logits[index, torch.from_numpy(ids).to(logits.device)] -= torch.from_numpy(penalty).float().to(logits.device)


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
