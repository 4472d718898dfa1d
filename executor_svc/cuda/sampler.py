"""From logits on the device to token ids on the device. Knows tensors and columns of parameters; waits for nothing.

A row without a choice (its logits are not numbers) becomes NO_TOKEN; the host finds that out when it reads the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.core.sampling import SamplingParams, SamplingRow
from executor_svc.core.sampling_draw import draw_token
from executor_svc.sampling import edit_logits

NO_TOKEN = -1


def greedy_tokens(logits: Tensor) -> Tensor:
    """The id of each row's largest logit, the lowest among equals; int64 [n] from [n, vocab_size]."""
    values, ids = logits.max(dim=-1)
    return torch.where(torch.isfinite(values), ids, NO_TOKEN)


class TokenEnds(Protocol):
    """The two ends of a step on the device: token ids in, sampled tokens out."""

    def read(self, input_ids: Tensor, last_tokens: Tensor) -> Tensor:
        """Token ids int64 [n], where -row - 1 in input_ids stands for the token that was sampled last for that row."""
        ...

    def choose(self, logits: Tensor, rows: Tensor, last_tokens: Tensor) -> Tensor:
        """The id of each row's largest logit, which also becomes the last token of its row of the batch.

        Args:
            logits: [n, vocab_size].
            rows: int64 [n], of the batch.
            last_tokens: int64 [max_num_seqs + 1], by row; written.

        Returns:
            int64 [n], NO_TOKEN for rows without a choice.
        """
        ...


class TorchTokens:
    """TokenEnds in plain torch operations."""

    def read(self, input_ids: Tensor, last_tokens: Tensor) -> Tensor:
        """See TokenEnds."""
        from_row = (-input_ids - 1).clamp(min=0)
        return torch.where(input_ids < 0, last_tokens[from_row], input_ids)

    def choose(self, logits: Tensor, rows: Tensor, last_tokens: Tensor) -> Tensor:
        """See TokenEnds."""
        tokens = greedy_tokens(logits)
        last_tokens[rows] = tokens.clamp(min=0)
        return tokens


class Draw(Protocol):
    """Draws from rows of logits."""

    def __call__(
        self, logits: Tensor, temperature: Tensor, top_p: Tensor, min_p: Tensor, top_k: Tensor, uniform: Tensor
    ) -> Tensor:
        """As core.sampling_draw.draw_token.

        Args:
            logits: [n, vocab_size].
            temperature: float32 [n]; rows of 0 are not drawn.
            top_p: float32 [n].
            min_p: float32 [n].
            top_k: int32 [n].
            uniform: float64 [n].

        Returns:
            int64 [n]; undefined where nothing is drawn.
        """
        ...


def draw_on_host(logits: Tensor, temperature: Tensor, top_p: Tensor, min_p: Tensor, top_k: Tensor, uniform: Tensor) -> Tensor:
    """A Draw that waits for the device: for devices without a kernel, and what the kernel is compared with."""
    drawn = torch.zeros(logits.shape[0], dtype=torch.int64)
    columns = zip(*(column.tolist() for column in (temperature, top_p, min_p, top_k, uniform)), strict=True)
    for row, (own_temperature, own_top_p, own_min_p, own_top_k, own_uniform) in enumerate(columns):
        values = logits[row].float().cpu()
        if own_temperature > 0 and bool(torch.isfinite(values.max())):
            params = SamplingParams(temperature=own_temperature, top_p=own_top_p, min_p=own_min_p, top_k=own_top_k)
            drawn[row] = draw_token(values.numpy(), params, own_uniform)
    return drawn.to(logits.device)


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Log probabilities of rows that asked, on the device.

    Attributes:
        rows: indices of them in the batch of logits.
        chosen: float32 [len(rows)].
        top_values: float32 [len(rows), most].
        top_ids: int64 [len(rows), most].
    """

    rows: Sequence[int]
    chosen: Tensor
    top_values: Tensor
    top_ids: Tensor


def sample_tokens(
    logits: Tensor, rows: Sequence[SamplingRow], columns: Sequence[Tensor] | None, draw: Draw
) -> tuple[Tensor, DeviceLogprobs | None]:
    """One token per row, whatever the rows ask for.

    Args:
        logits: [n, vocab_size], not changed.
        rows: n, how each is chosen.
        columns: temperature, top_p, min_p, top_k and uniform of all rows, as Draw takes them; None: all are greedy.
        draw: for rows that are not greedy.

    Returns:
        int64 [n] with NO_TOKEN for rows without a choice, and the log probabilities that were asked for.
    """
    logits = edit_logits(logits.float(), rows)
    tokens = greedy_tokens(logits)
    if columns is not None:
        drawn = draw(logits, *columns)
        tokens = torch.where((columns[0] > 0) & (tokens != NO_TOKEN), drawn, tokens)
    return tokens, _logprobs(logits, rows, tokens)


def _logprobs(logits: Tensor, rows: Sequence[SamplingRow], tokens: Tensor) -> DeviceLogprobs | None:
    asking = [index for index, row in enumerate(rows) if row.params.num_logprobs is not None]
    if not asking:
        return None
    logprobs = (logits if len(asking) == len(rows) else logits[asking]).log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[asking, None].clamp(min=0))[:, 0]
    most = min(max(rows[index].params.num_logprobs or 0 for index in asking), logits.shape[1])
    values, ids = logprobs.topk(most, dim=-1)
    return DeviceLogprobs(asking, chosen, values, ids)
