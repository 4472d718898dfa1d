"""One step: a plan in, tokens out. Knows the batch, the pool, the model and the sampler; no wire, no threads, no store.

One sequence that cannot be computed fails alone. If the forward pass itself raises, every chunk of the step is computed once
more by itself, so that only the culprit fails: KV is written to the same slots again, which changes nothing.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from common.ids import SeqId
from executor_svc.core.batch import BatchState, ScheduledChunk
from executor_svc.core.plan import BatchLimits, SequenceFailure, StepPlan
from executor_svc.core.sampling import PositionLogprobs, SamplingParams, SamplingRow
from executor_svc.kernels.backend import Backend
from executor_svc.kernels.batch import AttentionBatch
from executor_svc.kvcache.pool import KvPool
from executor_svc.model.forward_context import ForwardContext
from executor_svc.sampling import Sampler

log = logging.getLogger(__name__)
RunnerChunk = ScheduledChunk[SamplingParams]


class PagedModel(Protocol):
    """The model as the runner sees it; see executor_svc.model.load.LoadedModel."""

    def compute_logits(self, context: ForwardContext, input_ids: Tensor, position_ids: Tensor, sample_indices: Tensor) -> Tensor:
        """One forward pass over the packed batch: float32 [num_samples, vocab_size]."""
        ...


@dataclass(slots=True)  # made for every sequence in every step, which takes three times as long if it is frozen
class Sampled:
    """A token that was drawn; logprobs if the sequence asked for them. Nobody changes it."""

    seq_id: SeqId
    token_id: int
    logprobs: PositionLogprobs | None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What came out of one step.

    Attributes:
        sampled: in the order of the plan's chunks.
        failures: sequences that were dropped.
        num_tokens: tokens computed.
        prepare_s, forward_s, sample_s: where the time went, seconds.
        idle_s: waiting for the plan before this step, seconds.
    """

    step_id: int
    sampled: Sequence[Sampled]
    failures: Sequence[SequenceFailure]
    num_tokens: int
    prepare_s: float
    forward_s: float
    sample_s: float
    idle_s: float = 0.0


StepReport = Callable[[StepOutcome | Exception], None]
"""Takes the outcome of a step, on whatever thread it becomes known; an exception: the device failed, nothing follows."""


class StepRunner(Protocol):
    """Carries out plans on one device, in order; they are over when their report is called."""

    def reset(self) -> None:
        """Drops all sequences, as for a new session; no report of an earlier step comes afterwards."""
        ...

    def submit(self, plan: StepPlan[SamplingParams], report: StepReport, *, arrived_at: float) -> None:
        """Starts a step.

        Args:
            plan: the next one of the session.
            report: called once, at the latest when the step is over, in the order of plans.
            arrived_at: time.monotonic() when the plan came.

        Raises:
            InvalidParameter: the plan as a whole makes no sense; nothing was done, report is not called.
        """
        ...

    def execute(self, plan: StepPlan[SamplingParams], *, began_at: float | None = None) -> StepOutcome:
        """Carries a plan out and waits for its end.

        Args:
            plan: the next one of the session.
            began_at: time.monotonic() from which prepare_s counts; None: now.

        Raises:
            InvalidParameter: the plan as a whole makes no sense; nothing was done.
        """
        ...


class ModelRunner:
    """Runs the steps of one session after the other over one model and one pool."""

    def __init__(
        self,
        model: PagedModel,
        pool: KvPool,
        layer_indices: Sequence[int],
        *,
        backend: Backend,
        sampler: Sampler,
        limits: BatchLimits,
    ):
        """A runner without sequences.

        Args:
            model: computes logits through the pool.
            pool: KV of all layers.
            layer_indices: the model's layer number of each of pool.layer_caches.
            backend: attention of the model's layers.
            sampler: draws tokens from logits.
            limits: what a plan may ask for.
        """
        self.batch: BatchState[SamplingParams] = BatchState(limits)
        self.model = model
        self._pool = pool
        self._layer_caches = dict(zip(layer_indices, pool.layer_caches, strict=True))
        self._backend = backend
        self._sampler = sampler
        self._ended_at = time.monotonic()

    def reset(self) -> None:
        """Drops all sequences, as for a new session."""
        self.batch.clear()

    def submit(self, plan: StepPlan[SamplingParams], report: StepReport, *, arrived_at: float) -> None:
        """See StepRunner: the step is over when this returns."""
        outcome = self.execute(plan, began_at=max(arrived_at, self._ended_at))
        report(replace(outcome, idle_s=max(0.0, arrived_at - self._ended_at)))
        self._ended_at = time.monotonic()

    def execute(self, plan: StepPlan[SamplingParams], *, began_at: float | None = None) -> StepOutcome:
        """Carries a plan out.

        Args:
            plan: the next one of the session.
            began_at: time.monotonic() from which prepare_s counts; None: now.

        Raises:
            InvalidParameter: the plan as a whole makes no sense; nothing was done.
        """
        if began_at is None:
            began_at = time.monotonic()
        chunks, failures = self.batch.apply(plan)
        self._pool.copy_blocks(plan.block_copies)
        forward_at = time.monotonic()
        groups: list[tuple[Sequence[RunnerChunk], Tensor]] = []
        with torch.inference_mode():
            if chunks:
                groups, failed = self._compute(chunks)
                failures += failed
            sample_at = time.monotonic()
            sampled: dict[SeqId, Sampled] = {}
            for group, logits in groups:
                failures += self._sample(group, logits, sampled)
        return StepOutcome(
            step_id=plan.step_id,
            sampled=[sampled[chunk.seq_id] for chunk in plan.chunks if chunk.seq_id in sampled],
            failures=failures,
            num_tokens=sum(chunk.stop - chunk.start for chunk in chunks),
            prepare_s=forward_at - began_at,
            forward_s=sample_at - forward_at,
            sample_s=time.monotonic() - sample_at,
        )

    def _compute(self, chunks: Sequence[RunnerChunk]) -> tuple[list[tuple[Sequence[RunnerChunk], Tensor]], list[SequenceFailure]]:
        """Forward passes: one for all; one for each if that raises.

        Returns:
            Groups of the chunks that sample with their logits [len(group), vocab_size], and the sequences that failed.
        """
        try:
            return [self._forward(chunks)], []
        except Exception:
            log.exception("the forward pass of %d sequences failed; computing each by itself", len(chunks))
        groups, failures = [], []
        for chunk in chunks:
            try:
                groups.append(self._forward([chunk]))
            except Exception as error:
                failures.append(self.batch.fail(chunk.sequence.seq_id, f"the forward pass failed: {_reason(error)}"))
        return groups, failures

    def _forward(self, chunks: Sequence[RunnerChunk]) -> tuple[Sequence[RunnerChunk], Tensor]:
        packed = self.batch.pack(chunks)
        lengths = [chunk.stop - chunk.start for chunk in packed.chunks]
        attention = AttentionBatch(
            slot_mapping=torch.from_numpy(packed.slot_mapping),
            block_tables=torch.from_numpy(packed.block_tables),
            cu_seqlens_q=torch.from_numpy(packed.cu_seqlens_q),
            seq_lens=torch.from_numpy(packed.seq_lens),
            num_decodes=packed.num_decodes,
            max_seqlen_q=max(lengths),
            max_seqlen_k=int(packed.seq_lens.max()),
            block_size=self._pool.block_size,
        )
        context = ForwardContext(attention, self._backend, self._layer_caches, torch.from_numpy(packed.known_lens))
        logits = self.model.compute_logits(
            context,
            torch.from_numpy(packed.input_ids),
            torch.from_numpy(packed.positions),
            torch.from_numpy(packed.sample_indices),
        )
        for chunk in chunks:
            self.batch.advance(chunk)
        return packed.sampled_chunks, logits

    def _sample(self, chunks: Sequence[RunnerChunk], logits: Tensor, sampled: dict[SeqId, Sampled]) -> list[SequenceFailure]:
        """Draws a token for each row of logits [len(chunks), vocab_size] into sampled; returns those that could not."""
        if not chunks:
            return []
        try:
            return self._draw(chunks, logits, sampled)
        except Exception:
            log.exception("sampling of %d sequences failed; sampling each by itself", len(chunks))
        failures: list[SequenceFailure] = []
        for row, chunk in enumerate(chunks):
            try:
                failures += self._draw([chunk], logits[row : row + 1], sampled)
            except Exception as error:
                failures.append(self.batch.fail(chunk.sequence.seq_id, f"sampling failed: {_reason(error)}"))
        return failures

    def _draw(self, chunks: Sequence[RunnerChunk], logits: Tensor, sampled: dict[SeqId, Sampled]) -> list[SequenceFailure]:
        rows = [
            SamplingRow(
                params=chunk.sequence.sampling,
                token_ids=self.batch.token_ids(chunk.sequence.seq_id),
                num_prompt_tokens=chunk.sequence.num_prompt_tokens,
            )
            for chunk in chunks
        ]
        result = self._sampler.sample(logits, rows)
        failures: list[SequenceFailure] = []
        for row, chunk in enumerate(chunks):
            seq_id = chunk.sequence.seq_id
            if row in result.errors:
                failures.append(self.batch.fail(seq_id, result.errors[row]))
            else:
                self.batch.append_token(seq_id, result.token_ids[row])
                sampled[seq_id] = Sampled(seq_id, result.token_ids[row], result.logprobs[row])
        return failures


def _reason(error: Exception) -> str:
    """One line of an exception, for a message that goes to a client."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
