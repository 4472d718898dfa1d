"""Between the step loop and a reader: the news of one request, as text, merged while the reader is slow. Never blocks the loop.

Knows samples and their text; knows no wire message and no scheduler. Lossless: what is not read is put together, up to a
bound; beyond it the request ends with SlowConsumer.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.errors import OctavoError, SlowConsumer
from octavo.types.v1.types_pb2 import PositionLogprobs
from scheduler_svc.core.plan import SampleId, SequenceUpdate
from scheduler_svc.core.request import FinishReason
from scheduler_svc.text.sample_text import SampleText

MAX_PENDING_TOKENS = 4096
MAX_PENDING_TEXT = 256 << 10
MAX_LATE_S = 0.1
"""How much longer than asked for news may gather while no more come."""


@dataclass(slots=True)
class SampleDelta:
    """What is new of one sample since the last read; the fields of octavo.scheduler.v1.Delta."""

    index: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    stop_str: str | None = None
    error_message: str = ""


class RequestOutput:
    """The output of one request.

    Args:
        samples: one per sample, in order of index.
        echo: text to put in front of each sample's output.
        keep_stop: the text of a stop token stays in the output.
        is_bounded: False: the reader wants everything at once at the end.
    """

    def __init__(self, samples: Sequence[SampleText], *, echo: str = "", keep_stop: bool = False, is_bounded: bool = True):
        self._samples = samples
        self._keep_stop = keep_stop
        self._is_bounded = is_bounded
        self._pending = {i: SampleDelta(i, [echo]) for i in range(len(samples))} if echo else {}
        self._ended: set[int] = set()
        self._error: OctavoError | None = None
        self._num_pending_tokens = 0
        self._num_pending_text = 0
        self._news = asyncio.Event()
        self._gather_until_s = 0.0
        self._late: asyncio.TimerHandle | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens of all samples, those after a stop string left out."""
        return sum(sample.num_tokens for sample in self._samples)

    @property
    def is_over(self) -> bool:
        """Nothing more will come: every sample ended, or the request failed."""
        return self._error is not None or len(self._ended) == len(self._samples)

    @property
    def error(self) -> OctavoError | None:
        """Why the request failed; None if it did not."""
        return self._error

    def has_ended(self, index: int) -> bool:
        """Whether a sample has ended, by its tokens or by its text."""
        return index in self._ended

    def push(self, update: SequenceUpdate, logprobs: Sequence[PositionLogprobs]) -> None:
        """Takes in the news of one sample. Ask has_ended and error afterwards: text can end what tokens do not."""
        if self.is_over or update.index in self._ended:
            return
        delta, sample = self._delta(update.index), self._samples[update.index]
        texts: list[str] = []
        num_used = 0
        for token_id in update.token_ids:
            num_used += 1
            if token_id == update.stop_token_id and num_used == len(update.token_ids) and not self._keep_stop:
                texts.append(sample.finish([token_id]))
            else:
                texts.append(sample.push(token_id))
            if sample.matched_stop is not None:
                break
        if update.finish_reason is not None and sample.matched_stop is None:
            texts.append(sample.finish())
        delta.text += texts
        delta.token_ids += update.token_ids[:num_used]
        delta.logprobs += logprobs[:num_used]
        if update.finish_reason is not None and sample.matched_stop is None:
            delta.finish_reason, delta.stop_token_id = update.finish_reason, update.stop_token_id
            delta.error_message = update.error_message
        self._take(delta, sample, num_used, sum(map(len, texts)))

    def push_token(self, sample: SampleId, token_id: int) -> bool:
        """A token of one sample and nothing else. Returns whether nothing more is wanted of it."""
        index = sample.index
        if self.is_over or index in self._ended:
            return True
        delta, text = self._delta(index), self._samples[index]
        piece = text.push(token_id)
        delta.text.append(piece)
        delta.token_ids.append(token_id)
        self._take(delta, text, 1, len(piece))
        return self._error is not None or index in self._ended

    def _delta(self, index: int) -> SampleDelta:
        delta = self._pending.get(index)
        if delta is None:
            delta = self._pending[index] = SampleDelta(index)
        return delta

    def _take(self, delta: SampleDelta, sample: SampleText, num_tokens: int, num_characters: int) -> None:
        """So much was added to what is pending of a sample."""
        if sample.matched_stop is not None:
            delta.finish_reason, delta.stop_str = FinishReason.STOP, sample.matched_stop
        if delta.finish_reason is not None:
            self._ended.add(delta.index)
        self._num_pending_tokens += num_tokens
        self._num_pending_text += num_characters
        if self._is_bounded and (self._num_pending_tokens > MAX_PENDING_TOKENS or self._num_pending_text > MAX_PENDING_TEXT):
            self._error = SlowConsumer(
                f"the reader is more than {MAX_PENDING_TOKENS} tokens or {MAX_PENDING_TEXT} characters behind"
            )
        if self._is_bounded or self.is_over:
            self._tell()

    def fail(self, error: OctavoError) -> None:
        """Ends the request; what is pending can still be read."""
        if not self.is_over:
            self._error = error
            self._tell()

    async def read(self, gather_s: float = 0.0) -> list[SampleDelta]:
        """Waits for news and takes all of them, in order of index. After the last ones is_over is True and nothing is left.

        Args:
            gather_s: news gather for so long. Then the next ones take them along: whoever writes their messages is awake
                anyway, and those of one step go out together. The end of a request gathers nothing.

        Raises:
            OctavoError: the request failed, and everything before has been read.
        """
        if gather_s > 0 and not self.is_over:
            self._gather_until_s = asyncio.get_running_loop().time() + gather_s
            if self._news.is_set():
                self._news.clear()
                self._tell()
        await self._news.wait()
        self._news.clear()
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if self.is_over:
            self._news.set()
        deltas = [self._pending[index] for index in sorted(self._pending)]
        self._pending = {}
        self._num_pending_tokens = self._num_pending_text = 0
        if not deltas and self._error is not None:
            raise self._error
        return deltas

    def _tell(self) -> None:
        """Wakes the reader, now or when enough has gathered."""
        if self.is_over or not self._gather_until_s:
            self._news.set()
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._gather_until_s:
            self._news.set()
        elif self._late is None:
            self._late = loop.call_at(self._gather_until_s + MAX_LATE_S, self._news.set)

    @property
    def is_read(self) -> bool:
        """Every sample ended and everything has been read."""
        return self._error is None and self.is_over and not self._pending
