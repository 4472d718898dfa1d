"""What a client gets: plain, frozen values. Knows no wire format; calls.py makes them from messages."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class FinishReason(enum.StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    """A stop string, a stop token or the model's end of text."""
    LENGTH = "length"
    """max_tokens, or the model's context is full."""
    CANCELLED = "cancelled"
    ERROR = "error"
    """This sample failed alone; Finish.error_message says why."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sample ended.

    Attributes:
        stop_token_id, stop_str: what was matched, for FinishReason.STOP; both None at the model's own end of text.
        error_message: for FinishReason.ERROR.
    """

    reason: FinishReason
    stop_token_id: int | None = None
    stop_str: str | None = None
    error_message: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of the probability of a token."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log probabilities at one position of the output: of the chosen token, and of the most likely ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request, all samples together.

    Attributes:
        cached_tokens: prompt tokens whose KV was not computed for this request.
        cached_tokens_by_tier: the same by where they were: "device", "shm", "disk", "redis".
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_tokens_by_tier: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a request's time went, on the server's clock."""

    queue_s: float = 0.0
    time_to_first_token_s: float = 0.0
    total_s: float = 0.0

    def tokens_per_s(self, completion_tokens: int) -> float | None:
        """Output tokens a second after the first one; None for an answer of one token."""
        decode_s = self.total_s - self.time_to_first_token_s
        return (completion_tokens - 1) / decode_s if completion_tokens > 1 and decode_s > 0 else None


@dataclass(frozen=True, slots=True)
class Sample:
    """One of the n answers to a prompt.

    Attributes:
        token_ids: empty unless return_token_ids was asked for.
        logprobs: one per output token; empty unless asked for.
    """

    text: str
    finish: Finish
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole answer to a request, samples in order of index."""

    request_id: str
    samples: tuple[Sample, ...]
    usage: Usage
    timing: Timing

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.samples[0].text


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one sample. It ends on a whole character, and is never sent twice.

    Attributes:
        index: which of the n samples.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a stream.

    Attributes:
        finishes: one per sample, in order of index.
    """

    request_id: str
    finishes: tuple[Finish, ...]
    usage: Usage
    timing: Timing


Event = TextDelta | Finished
"""What stream() yields."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenised text.

    Attributes:
        text: what was tokenised, after the chat template.
    """

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Model:
    """One model of a server; name is "models/{model}"."""

    name: str
    max_context_tokens: int
    vocab_size: int
    dtype: str
    ready: bool
    num_executors: int
    has_tokenizer: bool
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
