"""One running request as the engine sees it: where it runs, when things happened, what it cost. Plain state, no policy."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from common.errors import OctavoError
from common.ids import BlockKey, SeqId
from octavo.types.v1.types_pb2 import PositionLogprobs
from scheduler_svc.core.plan import SampleId, SequenceUpdate
from scheduler_svc.core.request import Request


class Output(Protocol):
    """Who takes a request's tokens. None of the methods may wait: they are called from the step loop."""

    @property
    def num_tokens(self) -> int:
        """Output tokens of all samples."""
        ...

    @property
    def is_over(self) -> bool:
        """Nothing more is wanted."""
        ...

    @property
    def error(self) -> OctavoError | None:
        """Why the request failed; None if it did not."""
        ...

    def has_ended(self, index: int) -> bool:
        """Nothing more is wanted of this sample."""
        ...

    def push(self, update: SequenceUpdate, logprobs: Sequence[PositionLogprobs]) -> None:
        """News of one sample; as many logprobs as tokens, or none."""
        ...

    def push_token(self, sample: SampleId, token_id: int) -> bool:
        """A token of one sample and nothing else; what there is hundreds of in a step.

        Returns:
            Whether nothing more is wanted of the sample.
        """
        ...

    def fail(self, error: OctavoError) -> None:
        """The request is over."""
        ...


class Generation:
    """One request from its arrival to its end.

    Attributes:
        request: at the present executor; after a move it carries what was drawn before.
        seq_ids: of its live samples at the present executor, in order of index; empty before it is queued there.
        admitted_at_s, first_token_at_s, ended_at_s: on the engine's clock; None: not yet.
        cached_tokens_by_tier: prompt tokens that were not computed for it.
        is_cancelled: ended by the client.
        num_fruitless_sessions: sessions in a row that were lost with this request in the batch and no new token of it.
    """

    def __init__(self, request: Request, output: Output):
        self.request = request
        self.output = output
        self.seq_ids: tuple[SeqId, ...] = ()
        self.admitted_at_s: float | None = None
        self.first_token_at_s: float | None = None
        self.ended_at_s: float | None = None
        self.cached_tokens_by_tier: dict[str, int] = {}
        self.is_cancelled = False
        self.num_fruitless_sessions = 0
        self._prompt_keys: list[BlockKey] | None = None

    def prompt_keys(self, block_size: int) -> list[BlockKey]:
        """Keys of the prompt's full blocks; the same block_size in every call."""
        if self._prompt_keys is None:
            self._prompt_keys = self.request.keys_of_prompt(block_size)
            self.request = replace(self.request, prompt_keys=tuple(self._prompt_keys))  # whoever takes it need not hash again
        return self._prompt_keys

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed for it."""
        return sum(self.cached_tokens_by_tier.values())

    @property
    def queue_s(self) -> float:
        """From arrival to its place in the batch."""
        return 0.0 if self.admitted_at_s is None else self.admitted_at_s - self.request.arrival_s

    @property
    def time_to_first_token_s(self) -> float:
        """From arrival to the first token."""
        return 0.0 if self.first_token_at_s is None else self.first_token_at_s - self.request.arrival_s

    @property
    def total_s(self) -> float:
        """From arrival to the end."""
        return 0.0 if self.ended_at_s is None else self.ended_at_s - self.request.arrival_s
