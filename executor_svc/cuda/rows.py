"""How each row of the batch samples, as columns that a step picks its rows from. Knows sampling parameters, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from executor_svc.core.sampling import SamplingParams

Column = npt.NDArray[Any]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """What is drawn with, one entry per row of logits.

    Attributes:
        temperature: float32 [n]; 0: the row is greedy.
        top_p, min_p: float32 [n].
        top_k: int32 [n].
        uniform: float64 [n], in [0, 1).
    """

    temperature: Column
    top_p: Column
    min_p: Column
    top_k: Column
    uniform: Column

    @property
    def arrays(self) -> Sequence[Column]:
        """All of them, in the order of the attributes."""
        return self.temperature, self.top_p, self.min_p, self.top_k, self.uniform


class RowTable:
    """One entry per row of the batch; good from set until the row is set again.

    Attributes:
        num_given: int64 [max_num_seqs], tokens that came from the scheduler; those after them were sampled here.
    """

    def __init__(self, max_num_seqs: int):
        self.num_given = np.zeros(max_num_seqs, np.int64)
        self._num_prompt = np.zeros(max_num_seqs, np.int64)
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._is_plain = np.ones(max_num_seqs, np.bool_)
        self._has_penalties = np.zeros(max_num_seqs, np.bool_)

    def set(self, row: int, params: SamplingParams, *, num_given: int, num_prompt: int) -> None:
        """A sequence takes the row."""
        self.num_given[row] = num_given
        self._num_prompt[row] = num_prompt
        self._temperature[row] = params.temperature
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._top_k[row] = min(params.top_k, 2**31 - 1)
        self._seed[row] = params.seed
        self._has_penalties[row] = params.has_penalties
        edits = bool(params.logit_bias) or params.has_penalties or bool(params.suppressed_until_min_tokens)
        self._is_plain[row] = params.is_greedy and not edits and params.num_logprobs is None

    def are_plain(self, rows: Column) -> bool:
        """Whether the largest logit of each row is all that is wanted."""
        return bool(self._is_plain[rows].all())

    def need_history(self, rows: Column) -> bool:
        """Whether a row's logits depend on the tokens before."""
        return bool(self._has_penalties[rows].any())

    def draw_columns(self, rows: Column, num_tokens: Column) -> DrawColumns | None:
        """What the rows draw with.

        Args:
            rows: int64 [n].
            num_tokens: int64 [n], tokens known of each row, the new one not counted.

        Returns:
            None if all are greedy.
        """
        temperature = self._temperature[rows]
        if not temperature.any():
            return None
        uniform = uniform_draws(self._seed[rows], num_tokens - self._num_prompt[rows])
        return DrawColumns(temperature, self._top_p[rows], self._min_p[rows], self._top_k[rows], uniform)


def uniform_draws(seeds: Column, positions: Column) -> Column:
    """As core.sampling.uniform_draw for many rows: uint64 [n] and int64 [n] to float64 [n]."""
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN)
        state = _mix((state ^ (positions.astype(np.uint64) * _GOLDEN)) + _GOLDEN)
    uniform: Column = (state >> np.uint64(11)) * 2.0**-53
    return uniform


def _mix(value: Column) -> Column:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Column = value ^ (value >> np.uint64(31))
    return mixed
