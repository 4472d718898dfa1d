"""Notes of a simulated request when its tokens come. Knows no text, which simulated requests do not have."""

from collections.abc import Callable, Sequence

from common.errors import OctavoError
from octavo.types.v1.types_pb2 import PositionLogprobs
from scheduler_svc.core.plan import SampleId, SequenceUpdate
from scheduler_svc.simulation.outcome import Served
from scheduler_svc.simulation.virtual_time import VirtualTimeLoop


class TimedOutput:
    """See the module's first line; an Output of generation.py.

    Args:
        served: what is noted.
        clock: whose time it is.
        on_end: called once.
    """

    def __init__(self, served: Served, clock: VirtualTimeLoop, on_end: Callable[[], None]):
        self.error: OctavoError | None = None
        self.is_over = False
        self._served = served
        self._clock = clock
        self._on_end = on_end

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return self._served.num_tokens

    def has_ended(self, index: int) -> bool:
        """Nothing more is wanted."""
        return self.is_over

    def push(self, update: SequenceUpdate, logprobs: Sequence[PositionLogprobs]) -> None:
        """A token, or the end."""
        for token_id in update.token_ids:
            self.push_token(SampleId(update.request_id, update.seq_id, update.index), token_id)
        if update.finish_reason is not None:
            self._end()

    def push_token(self, sample: SampleId, token_id: int) -> bool:
        """A token."""
        self._served.last_s = self._clock.time()
        self._served.first_s = self._served.last_s if self._served.first_s is None else self._served.first_s
        self._served.num_tokens += 1
        return self.is_over

    def fail(self, error: OctavoError) -> None:
        """It failed."""
        if not self.is_over:
            self.error, self._served.error = error, error.reason
            self._end()

    def _end(self) -> None:
        self.is_over = True
        self._on_end()
