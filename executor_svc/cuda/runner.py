"""Steps on a GPU, queued ahead of their results. Knows the batch, the pool, the model and the stream; no wire, no store.

The host knows every number of a step except the tokens that are still being sampled: those stay on the device, by row, and the
next step reads them there. So a step is queued as soon as its plan is here, and nothing waits for it but the result thread.

    plan -> BatchState -> packed numbers -> one copy -> decode graph or forward pass -> tokens -> last_tokens (device)
                                                                                        └────> pinned copy -> ResultThread
"""

import logging
import queue
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.ids import BlockId
from executor_svc.core.batch import BatchState, PackedStep, ScheduledChunk
from executor_svc.core.plan import BatchLimits, SequenceFailure, StepPlan
from executor_svc.core.prefix_groups import PrefixGroups, PrefixIndex
from executor_svc.core.sampling import SamplingParams, SamplingRow
from executor_svc.core.short_chunks import divide
from executor_svc.cuda.graph_shapes import StepNumbers
from executor_svc.cuda.graphs import Replayed, StepGraphs
from executor_svc.cuda.results import Drawn, HostLogprobs, PendingStep, ResultThread
from executor_svc.cuda.rows import RowTable
from executor_svc.cuda.sampler import NO_TOKEN, DeviceLogprobs, Draw, TokenEnds, sample_tokens
from executor_svc.cuda.stream import DeviceStream
from executor_svc.cuda.upload import Uploads
from executor_svc.kernels.backend import Backend
from executor_svc.kernels.batch import AttentionBatch, LayerCache, SharedPrefixes
from executor_svc.model.forward_context import ForwardContext
from executor_svc.runner import StepOutcome, StepReport

log = logging.getLogger(__name__)
Chunk = ScheduledChunk[SamplingParams]


class DeviceModel(Protocol):
    """The model as this runner sees it; see executor_svc.model.load.LoadedModel."""

    def forward(self, context: ForwardContext, input_ids: Tensor, position_ids: Tensor, sample_indices: Tensor) -> Tensor:
        """One forward pass over the packed batch: [num_samples, vocab_size] in the model's dtype."""
        ...


class DevicePool(Protocol):
    """The pool as this runner sees it."""

    num_blocks: int
    block_size: int
    layer_caches: list[LayerCache]

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Queues copies of whole blocks, (source, destination), one after the other."""
        ...


class CudaRunner:
    """Runs the steps of one session after the other over one model and one pool. Plans come from one thread."""

    def __init__(
        self,
        model: DeviceModel,
        pool: DevicePool,
        layer_indices: Sequence[int],
        *,
        backend: Backend,
        tokens: TokenEnds,
        draw: Draw,
        limits: BatchLimits,
        stream: DeviceStream,
    ):
        """A runner without sequences and without graphs.

        Args:
            model: computes logits through the pool.
            pool: KV of all layers.
            layer_indices: the model's layer number of each of pool.layer_caches.
            backend: attention of the model's layers.
            tokens: how tokens come in and go out.
            draw: for rows that are not greedy.
            limits: what a plan may ask for.
            stream: that all work is queued on.
        """
        self.batch: BatchState[SamplingParams] = BatchState(limits)
        self.model = model
        self.graphs: StepGraphs | None = None
        self.layer_caches = dict(zip(layer_indices, pool.layer_caches, strict=True))
        self.last_tokens = torch.zeros(limits.max_num_seqs + 1, dtype=torch.int64, device=stream.device)
        self.uploads = Uploads(stream)
        self._pool = pool
        self._backend = backend
        self._tokens = tokens
        self._draw = draw
        self._stream = stream
        self._rows = RowTable(limits.max_num_seqs)
        self.prefixes = PrefixIndex(limits.block_size)
        self._results = ResultThread()
        self._under_way: deque[PendingStep] = deque()

    def reset(self) -> None:
        """See StepRunner."""
        self._results.drain()
        self._under_way.clear()
        self.batch.clear()
        self.prefixes = PrefixIndex(self.batch.limits.block_size)

    def close(self) -> None:
        """Ends the result thread after the steps that are under way."""
        self.reset()
        self._results.stop()

    def execute(self, plan: StepPlan[SamplingParams], *, began_at: float | None = None) -> StepOutcome:
        """See StepRunner."""
        found: queue.SimpleQueue[StepOutcome | Exception] = queue.SimpleQueue()
        self.submit(plan, found.put, arrived_at=time.monotonic() if began_at is None else began_at)
        outcome = found.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def submit(self, plan: StepPlan[SamplingParams], report: StepReport, *, arrived_at: float) -> None:
        """See StepRunner."""
        self._take_in_results(wait=False)
        chunks, failures = self.batch.apply(plan)
        for new in plan.new_sequences:
            sequence = self.batch.sequence(new.seq_id)
            if sequence is not None:
                self._rows.set(sequence.row, new.sampling, num_given=len(new.token_ids), num_prompt=new.num_prompt_tokens)
        if self._rows.need_history(np.array([chunk.sequence.row for chunk in chunks], np.int64)):
            self._take_in_results(wait=True)
            chunks = [chunk for chunk in chunks if self.batch.is_alive(chunk.sequence)]
        drawn: list[Drawn] = []
        with self._stream.use(), torch.inference_mode():
            self._pool.copy_blocks(plan.block_copies)
            if chunks:
                drawn, failed = self._compute(chunks)
                failures += failed
            mark = self._stream.mark()
        self.uploads.guard(mark)
        pending = PendingStep(
            step_id=plan.step_id,
            order=[chunk.seq_id for chunk in plan.chunks],
            drawn=drawn,
            failures=failures,
            num_tokens=sum(chunk.stop - chunk.start for chunk in chunks),
            mark=mark,
            arrived_at=arrived_at,
            launched_at=time.monotonic(),
            report=report,
        )
        self._under_way.append(pending)
        self._results.add(pending)

    def _take_in_results(self, *, wait: bool) -> None:
        """Tells the batch what finished steps sampled; wait: all steps."""
        while self._under_way and (wait or self._under_way[0].mark.is_over()):
            pending = self._under_way.popleft()
            pending.mark.wait()
            for drawn in pending.drawn:
                token_ids = drawn.token_ids()
                has_token = token_ids != NO_TOKEN
                rows, tenancies, indices = drawn.rows[has_token], drawn.tenancies[has_token], drawn.indices[has_token]
                self.batch.learn(rows, tenancies, indices, token_ids[has_token])
                for place in np.flatnonzero(~has_token).tolist():
                    if self.batch.is_alive(drawn.sequences[place]):
                        self.batch.fail(drawn.sequences[place].seq_id, "")  # the result thread says why

    def _compute(self, chunks: Sequence[Chunk]) -> tuple[list[Drawn], list[SequenceFailure]]:
        """Queues one forward pass for all, or one for each if that raises."""
        try:
            return [self._launch(chunks)], []
        except Exception:
            self._stream.check()  # raises if the device itself is lost
            log.exception("the forward pass of %d sequences failed; computing each by itself", len(chunks))
        drawn, failures = [], []
        for chunk in chunks:
            try:
                drawn.append(self._launch([chunk]))
            except Exception as error:
                self._stream.check()
                text = str(error).splitlines()[0][:200] if str(error) else ""
                message = f"the forward pass failed: {type(error).__name__}: {text}"
                failures.append(self.batch.fail(chunk.sequence.seq_id, message))
        return drawn, failures

    def _launch(self, chunks: Sequence[Chunk]) -> Drawn:
        """Queues the work of chunks, from their numbers to the copy of their tokens."""
        divided = divide(chunks, self.batch.limits.max_num_seqs)
        packed = self.batch.pack(divided.chunks)
        input_ids = self._input_ids(packed)
        sampled_rows = packed.rows[packed.samples]
        groups = divided.groups(self._groups(packed, divided.num_decodes))
        replayed = self._replay(packed, input_ids, groups)
        if replayed is not None:
            logits, tokens, places = replayed.logits, replayed.tokens, replayed.places
        else:
            logits, tokens = self._forward(packed, sampled_rows, input_ids, groups)
            places = np.arange(len(sampled_rows))
        logprobs = None
        if len(sampled_rows) and not self._rows.are_plain(sampled_rows):
            device_rows, device_places = self.uploads.send([sampled_rows, places])
            tokens, logprobs = self._sample(logits[device_places], packed.sampled_chunks, sampled_rows)
            self.last_tokens[device_rows] = tokens.clamp(min=0)
            places = np.arange(len(sampled_rows))
        host_tokens = self._stream.download(tokens)
        self.batch.advance_ahead(chunks)
        return Drawn(
            sequences=[chunk.sequence for chunk in packed.sampled_chunks],
            rows=sampled_rows,
            tenancies=self.batch.tenancies(sampled_rows),
            indices=packed.seq_lens[packed.samples].astype(np.int64),
            tokens=host_tokens,
            places=places,
            logprobs=logprobs,
        )

    def _input_ids(self, packed: PackedStep[SamplingParams]) -> npt.NDArray[np.int64]:
        """Token ids, with -row - 1 for those that were sampled here; only single tokens can be such."""
        input_ids = packed.input_ids
        num, rows = packed.num_decodes, packed.rows
        was_sampled = packed.positions[:num] >= self._rows.num_given[rows[:num]]
        input_ids[:num][was_sampled] = -1 - rows[:num][was_sampled]
        return input_ids

    def _groups(self, packed: PackedStep[SamplingParams], num: int) -> PrefixGroups | None:
        """Those of the first num sequences, decodes, that share their first blocks."""
        rows = packed.rows[:num]
        return self.prefixes.groups(rows, self.batch.tenancies(rows), packed.seq_lens[:num], packed.block_tables[:num])

    def _replay(
        self, packed: PackedStep[SamplingParams], input_ids: npt.NDArray[np.int64], groups: PrefixGroups | None
    ) -> Replayed | None:
        """The step by a graph, if there is one that has room."""
        if self.graphs is None:
            return None
        return self.graphs.run(
            StepNumbers(
                input_ids=input_ids,
                positions=packed.positions,
                slot_mapping=packed.slot_mapping,
                rows=packed.rows,
                samples=packed.samples,
                cu_seqlens_q=packed.cu_seqlens_q,
                seq_lens=packed.seq_lens,
                block_tables=packed.block_tables,
                num_decodes=packed.num_decodes,
                groups=groups,
            )
        )

    def _forward(
        self,
        packed: PackedStep[SamplingParams],
        sampled_rows: npt.NDArray[np.int64],
        input_ids: npt.NDArray[np.int64],
        groups: PrefixGroups | None,
    ) -> tuple[Tensor, Tensor]:
        """The step kernel by kernel: logits [num_sampled, vocab_size], and the tokens of the largest, as last tokens too."""
        ids, positions, slots, sample_indices, device_rows, cu_seqlens, seq_lens, known_lens, tables, *shared = self.uploads.send(
            [
                input_ids,
                packed.positions,
                packed.slot_mapping,
                packed.sample_indices,
                sampled_rows,
                packed.cu_seqlens_q,
                packed.seq_lens,
                packed.known_lens,
                packed.block_tables,
                *([] if groups is None else groups.padded(packed.num_decodes)),
            ]
        )
        lengths = [chunk.stop - chunk.start for chunk in packed.chunks]
        attention = AttentionBatch(
            slot_mapping=slots,
            block_tables=tables,
            cu_seqlens_q=cu_seqlens,
            seq_lens=seq_lens,
            num_decodes=packed.num_decodes,
            max_seqlen_q=max(lengths),
            max_seqlen_k=int(packed.seq_lens.max()),
            block_size=self._pool.block_size,
            query_lens=lengths,
            kv_lens=packed.seq_lens.tolist(),
            shared=SharedPrefixes(*shared) if shared else None,
        )
        context = ForwardContext(attention, self._backend, self.layer_caches, known_lens)
        ids = self._tokens.read(ids, self.last_tokens)
        logits = self.model.forward(context, ids, positions, sample_indices)
        return logits, self._tokens.choose(logits, device_rows, self.last_tokens)

    def _sample(self, logits: Tensor, chunks: Sequence[Chunk], rows: npt.NDArray[np.int64]) -> tuple[Tensor, HostLogprobs | None]:
        """Tokens of rows that want more than the largest logit."""
        num_tokens = np.fromiter((chunk.sequence.num_tokens for chunk in chunks), np.int64, len(chunks))
        columns = self._rows.draw_columns(rows, num_tokens)
        sampling_rows = [
            SamplingRow(
                params=chunk.sequence.sampling,
                token_ids=self.batch.token_ids(chunk.sequence.seq_id),
                num_prompt_tokens=chunk.sequence.num_prompt_tokens,
            )
            for chunk in chunks
        ]
        on_device = None if columns is None else self.uploads.send(columns.arrays)
        tokens, logprobs = sample_tokens(logits, sampling_rows, on_device, self._draw)
        return tokens, None if logprobs is None else self._download(logprobs, chunks)

    def _download(self, logprobs: DeviceLogprobs, chunks: Sequence[Chunk]) -> HostLogprobs:
        return HostLogprobs(
            rows=logprobs.rows,
            nums=[chunks[row].sequence.sampling.num_logprobs or 0 for row in logprobs.rows],
            chosen=self._stream.download(logprobs.chosen),
            top_values=self._stream.download(logprobs.top_values),
            top_ids=self._stream.download(logprobs.top_ids),
        )
