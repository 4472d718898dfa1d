"""The requests at one executor: found by id and by sequence, given their news, and told when their time is up.

Knows generations and what the core says of their sequences. Does not know plans, the executor or why a request ends.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from common.clock import Clock
from common.errors import DeadlineExceeded, ExecutorLost, OctavoError, QueueTimeout
from common.ids import RequestId, SeqId
from octavo.types.v1.types_pb2 import PositionLogprobs
from scheduler_svc.core.plan import SequenceUpdate
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.updates import StepUpdates
from scheduler_svc.generation import Generation

_MAX_FRUITLESS_SESSIONS = 5


class Host(Protocol):
    """Whose requests they are."""

    def end(self, generation: Generation, error: OctavoError | None) -> None:
        """A request is over, by its output or for a reason."""
        ...

    def end_sample(self, seq_id: SeqId) -> None:
        """The output of one sample is over, its request is not."""
        ...

    def expire(self) -> None:
        """The time of a request may be up."""
        ...


class Residents:
    """See the module's first lines.

    Attributes:
        generations: all of them, by id.
    """

    def __init__(self, host: Host, clock: Clock):
        self.generations: dict[RequestId, Generation] = {}
        self._host = host
        self._clock = clock
        self._by_seq_id: dict[SeqId, Generation] = {}
        self._with_logprobs: set[RequestId] = set()
        self._deadline_timers: dict[RequestId, list[asyncio.TimerHandle]] = {}
        self._ran_in_session: set[RequestId] = set()

    @property
    def want_logprobs(self) -> bool:
        """Whether any of them has log probabilities beside its tokens."""
        return bool(self._with_logprobs)

    def has(self, generation: Generation) -> bool:
        """Whether it is here."""
        return self.generations.get(generation.request.request_id) is generation

    def of_sequence(self, seq_id: SeqId) -> Generation | None:
        """Whose sequence it is; None: of nobody who is here."""
        return self._by_seq_id.get(seq_id)

    def add(self, generation: Generation) -> None:
        """Takes in a request whose sequences are queued."""
        request = generation.request
        self.generations[request.request_id] = generation
        for seq_id in generation.seq_ids:
            self._by_seq_id[seq_id] = generation
        if request.sampling.num_logprobs is not None:
            self._with_logprobs.add(request.request_id)
        for due_s in (request.queue_deadline_s, request.deadline_s):
            if due_s is not None:
                delay_s = max(0.0, due_s - self._clock.now())
                timer = asyncio.get_running_loop().call_later(delay_s + 0.001, self._host.expire)
                self._deadline_timers.setdefault(request.request_id, []).append(timer)

    def remove(self, generation: Generation) -> None:
        """Lets one go."""
        request_id = generation.request.request_id
        del self.generations[request_id]
        self._with_logprobs.discard(request_id)
        for timer in self._deadline_timers.pop(request_id, ()):
            timer.cancel()
        for seq_id in generation.seq_ids:
            self._by_seq_id.pop(seq_id, None)
        generation.seq_ids = ()

    def note_admitted(self, seq_id: SeqId, cached_tokens: Callable[[RequestId], dict[str, int]]) -> None:
        """A sequence has its place in the batch; cached_tokens: of its request, by tier."""
        generation = self._by_seq_id.get(seq_id)
        if generation is None:
            return
        self._ran_in_session.add(generation.request.request_id)
        if generation.admitted_at_s is None:
            generation.admitted_at_s = self._clock.now()
            generation.cached_tokens_by_tier = cached_tokens(generation.request.request_id)

    def deliver(self, updates: StepUpdates, logprobs: Mapping[SeqId, Sequence[PositionLogprobs]]) -> None:
        """Hands out what a step brought. Most of it is one token for a sequence, which goes the short way."""
        ended, by_seq_id, now_s = updates.ended, self._by_seq_id, self._clock.now()
        for sample, token_id in zip(updates.samples, updates.token_ids, strict=True):
            seq_id = sample.seq_id
            if seq_id in ended or seq_id in logprobs:
                self._push(updates.update_of(sample, token_id), logprobs.get(seq_id, ()))
                continue
            generation = by_seq_id.get(seq_id)
            if generation is None:
                continue
            generation.num_fruitless_sessions = 0
            if generation.first_token_at_s is None:
                generation.first_token_at_s = now_s
            if generation.output.push_token(sample, token_id):
                self._note_end(generation, seq_id)
        for update in updates.failed:
            self._push(update, ())

    def end_late(self, updates: Iterable[SequenceUpdate]) -> None:
        """Ends those whose time is up."""
        for update in updates:
            generation = self.generations.get(update.request_id)
            if generation is None:
                continue
            if update.finish_reason is FinishReason.QUEUE_TIMEOUT:
                self._host.end(generation, QueueTimeout("queue_timeout: the request waited longer for a place in the batch"))
            else:
                metadata = {"generatedTokens": str(generation.output.num_tokens)}
                message = "qos.deadline: the request has not ended by then"
                self._host.end(generation, DeadlineExceeded(message, metadata=metadata))

    def end_fruitless(self, lost: Callable[[Generation, str], ExecutorLost]) -> None:
        """The session is over. A request that is there whenever an executor dies may be why: it is not tried for ever."""
        for request_id in self._ran_in_session:
            generation = self.generations.get(request_id)
            if generation is None:
                continue
            generation.num_fruitless_sessions += 1
            if generation.num_fruitless_sessions >= _MAX_FRUITLESS_SESSIONS:
                error = lost(generation, f"was lost {_MAX_FRUITLESS_SESSIONS} times before the next token")
                self._host.end(generation, error)
        self._ran_in_session.clear()

    def _push(self, update: SequenceUpdate, logprobs: Sequence[PositionLogprobs]) -> None:
        generation = self.generations.get(update.request_id)
        if generation is None:
            return
        if update.token_ids:
            generation.num_fruitless_sessions = 0
            if generation.first_token_at_s is None:
                generation.first_token_at_s = self._clock.now()
        generation.output.push(update, logprobs)
        if generation.output.is_over or (update.finish_reason is None and generation.output.has_ended(update.index)):
            self._note_end(generation, update.seq_id)

    def _note_end(self, generation: Generation, seq_id: SeqId) -> None:
        if generation.output.is_over:
            self._host.end(generation, None)
        else:
            self._host.end_sample(seq_id)
