"""How a sequence's next token is chosen, and the random number of each position. Knows no tensor and no wire.

The number drawn at output position i depends on (seed, i) only, never on the batch, the chunking or a preemption before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one sequence: the fields and ranges of octavo.executor.v1.SequenceSampling.

    Attributes:
        temperature: 0: the most likely token, the lowest id among equals.
        top_p: keep the most likely tokens until their probabilities reach it; 1: all.
        top_k: keep that many of the most likely tokens (and those equal to the last); 0: all.
        min_p: drop tokens less likely than min_p times the most likely; 0: none.
        presence_penalty: subtracted from logits of ids in the output.
        frequency_penalty: subtracted per occurrence in the output.
        repetition_penalty: divides positive and multiplies negative logits of ids in prompt or output; 1: off.
        seed: of the draws.
        logit_bias: added to logits, by token id.
        min_tokens: number of output tokens before which suppressed_until_min_tokens cannot be drawn.
        num_logprobs: None: no log probabilities; 0: of the chosen token; n: also of the n most likely.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    suppressed_until_min_tokens: frozenset[int] = frozenset()
    num_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_filters(self) -> bool:
        """Whether unlikely tokens are left out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row of logits: how its token is chosen, and the tokens before it.

    Attributes:
        token_ids: int [num_tokens], prompt and output so far; read, not kept.
        num_prompt_tokens: how many of them are the prompt.
    """

    params: SamplingParams
    token_ids: npt.NDArray[np.int32] | Sequence[int]
    num_prompt_tokens: int

    @property
    def position(self) -> int:
        """Index of the new token in the output."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def suppresses(self) -> bool:
        """Whether some ids cannot be drawn yet."""
        return self.position < self.params.min_tokens and bool(self.params.suppressed_until_min_tokens)

    @property
    def edits_logits(self) -> bool:
        """Whether the logits change before anything is chosen."""
        return bool(self.params.logit_bias) or self.params.has_penalties or self.suppresses


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of a token's probability after bias and penalties, at temperature 1."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Of the chosen token, and of the most likely ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


def uniform_draw(seed: int, position: int) -> float:
    """A number in [0, 1) that looks random and depends on both arguments only.

    Two rounds of the splitmix64 finaliser over seed and position, so that neighbouring seeds and positions are unrelated.
    """
    state = _mix((seed + _GOLDEN) & _MASK)
    state = _mix((state ^ (position * _GOLDEN)) + _GOLDEN & _MASK)
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
