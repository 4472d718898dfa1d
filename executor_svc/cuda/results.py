"""Steps that are under way, and the thread that reads their results as they come. Knows marks and host copies; queues no work."""

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from common.ids import SeqId
from executor_svc.core.batch import BatchSequence
from executor_svc.core.plan import SequenceFailure
from executor_svc.core.sampling import PositionLogprobs, SamplingParams, TokenLogprob
from executor_svc.cuda.sampler import NO_TOKEN
from executor_svc.cuda.stream import Mark
from executor_svc.runner import Sampled, StepOutcome, StepReport

log = logging.getLogger(__name__)
Ints = npt.NDArray[np.int64]
NO_CHOICE = "the logits are not numbers, or every token is ruled out"


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """Log probabilities on their way to the host; see DeviceLogprobs.

    Attributes:
        nums: how many of the most likely each asking row wants.
    """

    rows: Sequence[int]
    nums: Sequence[int]
    chosen: Tensor
    top_values: Tensor
    top_ids: Tensor

    def read(self, token_ids: Sequence[int]) -> dict[int, PositionLogprobs]:
        """By row, once they have come."""
        found = {}
        for at, row in enumerate(self.rows):
            num = min(self.nums[at], self.top_ids.shape[1])
            top = zip(self.top_ids[at, :num].tolist(), self.top_values[at, :num].tolist(), strict=True)
            found[row] = PositionLogprobs(
                chosen=TokenLogprob(token_ids[row], float(self.chosen[at])),
                top=tuple(TokenLogprob(token_id, logprob) for token_id, logprob in top),
            )
        return found


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens of one forward pass on their way to the host.

    Attributes:
        sequences: n that sampled.
        rows: int64 [n], of the batch.
        tenancies: int64 [n], as BatchState.tenancies when the step was queued.
        indices: int64 [n], the place of the new token in its sequence.
        tokens: int, good once the step is over.
        places: int64 [n], where in tokens the new ones are.
        logprobs: None: nobody asked.
    """

    sequences: Sequence[BatchSequence[SamplingParams]]
    rows: Ints
    tenancies: Ints
    indices: Ints
    tokens: Tensor
    places: Ints
    logprobs: HostLogprobs | None

    def token_ids(self) -> Ints:
        """Int64 [n], NO_TOKEN where there was no choice; the step is over."""
        found: Ints = self.tokens.numpy()[self.places]
        return found


@dataclass(slots=True)
class PendingStep:
    """A step whose work is queued.

    Attributes:
        order: sequences of the plan's chunks, in its order.
        failures: sequences that failed before anything was queued for them.
        mark: the end of its work.
        arrived_at, launched_at: time.monotonic() of the plan's arrival and of the last of its work being queued.
    """

    step_id: int
    order: Sequence[SeqId]
    drawn: Sequence[Drawn]
    failures: Sequence[SequenceFailure]
    num_tokens: int
    mark: Mark
    arrived_at: float
    launched_at: float
    report: StepReport

    def outcome(self, failed: set[SeqId], previous_ended_at: float, ended_at: float) -> StepOutcome:
        """What came out; the step is over.

        Args:
            failed: sequences that failed in earlier steps: what this one made of them does not count. Grows.
            previous_ended_at: time.monotonic() when the step before was over.
            ended_at: when this one was.
        """
        failures = [failure for failure in self.failures if failure.seq_id not in failed]
        sampled: dict[SeqId, Sampled] = {}
        for drawn in self.drawn:
            token_ids: list[int] = drawn.token_ids().tolist()
            logprobs: Mapping[int, PositionLogprobs] = drawn.logprobs.read(token_ids) if drawn.logprobs is not None else {}
            for row, (sequence, token_id) in enumerate(zip(drawn.sequences, token_ids, strict=True)):
                seq_id = sequence.seq_id
                if seq_id in failed:
                    continue
                if token_id == NO_TOKEN:
                    failed.add(seq_id)
                    failures.append(SequenceFailure(seq_id, NO_CHOICE))
                else:
                    sampled[seq_id] = Sampled(seq_id, token_id, logprobs.get(row))
        ready_at = max(self.arrived_at, previous_ended_at)
        return StepOutcome(
            step_id=self.step_id,
            sampled=[sampled[seq_id] for seq_id in self.order if seq_id in sampled],
            failures=failures,
            num_tokens=self.num_tokens,
            prepare_s=max(0.0, min(self.launched_at, ended_at) - ready_at),
            forward_s=ended_at - max(min(self.launched_at, ended_at), ready_at),
            sample_s=0.0,
            idle_s=max(0.0, self.arrived_at - previous_ended_at),
        )


class ResultThread:
    """Waits for one step after the other and reports it."""

    def __init__(self) -> None:
        self._queue: queue.Queue[PendingStep | None] = queue.Queue()
        self._failed: set[SeqId] = set()
        self._ended_at = time.monotonic()
        threading.Thread(target=self._run, name="results", daemon=True).start()

    def add(self, pending: PendingStep) -> None:
        """The step's work is queued."""
        self._queue.put(pending)

    def drain(self) -> None:
        """Returns when everything added has been reported; then forgets which sequences failed."""
        self._queue.join()
        self._failed.clear()

    def stop(self) -> None:
        """Ends the thread after what was added."""
        self._queue.put(None)

    def _run(self) -> None:
        while (pending := self._queue.get()) is not None:
            try:
                self._finish(pending)
            except ConnectionError:
                log.info("the front is gone; nobody reads results")
            finally:
                self._queue.task_done()

    def _finish(self, pending: PendingStep) -> None:
        try:
            pending.mark.wait()
            ended_at = time.monotonic()
            outcome = pending.outcome(self._failed, self._ended_at, ended_at)
        except Exception as error:  # the device is lost, and every later step with it
            pending.report(error)
            return
        self._ended_at = ended_at
        pending.report(outcome)
