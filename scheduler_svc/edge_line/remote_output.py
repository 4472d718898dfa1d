"""Where a request's tokens go when its reader is in another process. Knows counts and ends; no text, no socket."""

from collections.abc import Callable, Sequence

from common.errors import OctavoError
from common.ids import SeqId
from octavo.scheduler.v1 import edge_line_pb2 as pb
from octavo.types.v1.types_pb2 import PositionLogprobs
from scheduler_svc.core.plan import SampleId, SequenceUpdate
from scheduler_svc.edge_line import convert
from scheduler_svc.edge_line.news import PendingNews
from scheduler_svc.generation import Generation


class RemoteOutput:
    """An Output (see generation.py) that puts its news together with those of the edge's other requests.

    Args:
        first_sample: its number on the line.
        n: samples.
        news: of the edge.
        tell: called when news has something new.

    Attributes:
        generation: of the request; None while the engine has not taken it.
    """

    __slots__ = ("_ended", "_error", "_first_sample", "_has_started", "_news", "_num_tokens", "_seq_ids", "_tell", "generation")

    def __init__(self, first_sample: int, n: int, news: PendingNews, tell: Callable[[], None]):
        self.generation: Generation | None = None
        self._first_sample = first_sample
        self._news = news
        self._tell = tell
        self._num_tokens = [0] * n
        self._seq_ids: list[SeqId | None] = [None] * n
        self._ended: set[int] = set()
        self._error: OctavoError | None = None
        self._has_started = False

    @property
    def num_tokens(self) -> int:
        """Output tokens of all samples."""
        return sum(self._num_tokens)

    @property
    def is_over(self) -> bool:
        """Nothing more is wanted."""
        return self._error is not None or len(self._ended) == len(self._num_tokens)

    @property
    def error(self) -> OctavoError | None:
        """Why the request failed; None if it did not."""
        return self._error

    def has_ended(self, index: int) -> bool:
        """Nothing more is wanted of this sample."""
        return index in self._ended

    def push(self, update: SequenceUpdate, logprobs: Sequence[PositionLogprobs]) -> None:
        """News of one sample; called from the step loop."""
        index = update.index
        if self._error is not None or index in self._ended:
            return
        token_ids, news = update.token_ids, self._news
        self._num_tokens[index] += len(token_ids)
        self._seq_ids[index] = update.seq_id
        if not self._has_started and token_ids:
            self._start()
        if update.finish_reason is None and not logprobs:
            for token_id in token_ids:
                news.samples.append(self._first_sample + index)
                news.token_ids.append(token_id)
        else:
            news.updates.append(convert.sample_news(self._first_sample + index, update, logprobs))
            if update.finish_reason is not None:
                self._ended.add(index)
        self._tell()

    def push_token(self, sample: SampleId, token_id: int) -> bool:
        """A token of one sample and nothing else; called from the step loop."""
        index = sample.index
        if self._error is not None or index in self._ended:
            return True
        self._num_tokens[index] += 1
        self._seq_ids[index] = sample.seq_id
        if not self._has_started:
            self._start()
        news = self._news
        news.samples.append(self._first_sample + index)
        news.token_ids.append(token_id)
        self._tell()
        return False

    def fail(self, error: OctavoError) -> None:
        """The request is over; the edge is told why."""
        if not self.is_over:
            self._error = error
            self._news.failures.append(pb.RequestFailure(first_sample=self._first_sample, status=convert.error_bytes(error)))
            self._tell()

    def fail_at_edge(self, error: OctavoError) -> None:
        """The request is over, and the edge knows."""
        if not self.is_over:
            self._error = error

    def end_sample(self, index: int, num_tokens: int) -> SeqId | None:
        """The edge found the end of a sample in its text.

        Args:
            index: of the sample.
            num_tokens: of it that count; those that were on their way do not.

        Returns:
            The sequence that draws its tokens, if it goes on.
        """
        if self.is_over or index in self._ended:
            return None
        self._ended.add(index)
        self._num_tokens[index] = num_tokens
        return self._seq_ids[index]

    def _start(self) -> None:
        self._has_started = True
        generation = self.generation
        assert generation is not None  # tokens come for what the engine has taken
        start = pb.RequestStart(
            first_sample=self._first_sample,
            admitted_at_s=generation.admitted_at_s or 0.0,
            first_token_at_s=generation.first_token_at_s or 0.0,
            cached_tokens_by_tier=generation.cached_tokens_by_tier,
        )
        self._news.starts.append(start)
