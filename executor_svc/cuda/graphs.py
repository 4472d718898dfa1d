"""Steps as CUDA graphs: captured once per shape, replayed with other numbers in the same memory.

Knows the model, the layers' caches and shapes. Does not know sequences or plans.

    numbers of the step -> one copy into static memory -> graph: last tokens -> model -> logits -> largest -> last tokens
"""

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_svc.core.plan import BatchLimits
from executor_svc.cuda.graph_shapes import NUM_CHUNKS, GraphShape, GraphShapes, Ints, StepNumbers
from executor_svc.cuda.sampler import TokenEnds
from executor_svc.cuda.stream import DeviceStream
from executor_svc.cuda.upload import ALIGNMENT, Array, Uploads
from executor_svc.kernels.backend import Backend
from executor_svc.kernels.batch import AttentionBatch, LayerCache, SharedPrefixes
from executor_svc.model.forward_context import ForwardContext

log = logging.getLogger(__name__)
Forward = Callable[[ForwardContext, Tensor, Tensor, Tensor], Tensor]
_DTYPES = (*(torch.int64,) * 5, *(torch.int32,) * 6)
"""Of the arrays of StepNumbers.padded, those of groups last."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """One shape's graph.

    Attributes:
        logits: [num_rows, vocab_size], good from a replay until the next one of any shape.
        tokens: int64 [num_rows], same.
    """

    replay: Callable[[], None]
    logits: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a graph computed; good until the next step.

    Attributes:
        logits: [num_rows, vocab_size].
        tokens: int64 [num_rows], of the largest logits.
        places: int64 [num_sampled], the results that count, in the order of the step's sequences.
    """

    logits: Tensor
    tokens: Tensor
    places: Ints


class StepGraphs:
    """The graphs of one model and pool, all in the memory that the largest needs."""

    def __init__(
        self,
        forward: Forward,
        backend: Backend,
        layer_caches: Mapping[int, LayerCache],
        limits: BatchLimits,
        last_tokens: Tensor,
        *,
        tokens: TokenEnds,
        stream: DeviceStream,
        uploads: Uploads,
    ):
        """No graphs yet.

        Args:
            forward: of the model.
            backend: that can be captured: nothing it does depends on the values of a batch.
            layer_caches: by layer number.
            limits: of plans.
            last_tokens: int64 [max_num_seqs + 1], by row; the last row is for padding.
            tokens: how tokens come in and go out.
            stream: that steps run on.
            uploads: of the runner.
        """
        device = stream.device
        self._forward = forward
        self._backend = backend
        self._layer_caches = layer_caches
        self._limits = limits
        self._last_tokens = last_tokens
        self._tokens = tokens
        self._stream = stream
        self._uploads = uploads
        self._shapes = GraphShapes(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._graphs: dict[GraphShape, _Graph] = {}
        max_rows = limits.max_num_seqs + NUM_CHUNKS
        self._width = -(-(limits.max_model_len + 1) // limits.block_size)
        num_bytes = max(_offsets(shape)[-1] for shape in self._shapes.shapes) + 4 * max_rows * self._width
        self._received = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._block_tables = torch.zeros(max_rows, self._width, dtype=torch.int32, device=device)

    @property
    def num_graphs(self) -> int:
        """Graphs that exist."""
        return len(self._graphs)

    def capture(self, progress: Callable[[str], None]) -> None:
        """Captures every shape, the largest first, so that the others fit into its memory.

        Raises:
            Exception: whatever the model does that cannot be captured; graphs captured until then are good.
        """
        started = time.monotonic()
        with self._stream.use(), torch.inference_mode():
            for shape in self._shapes.shapes:
                self._receive(_NOTHING, shape)
                self._body(shape)  # compiles kernels, and takes memory that lives longer than a step
                self._stream.check()
                replay, (logits, tokens) = self._stream.capture(functools.partial(self._body, shape))
                self._graphs[shape] = _Graph(replay, logits, tokens)
            self._uploads.guard(self._stream.mark())
            self._stream.check()
        progress(f"captured {len(self._graphs)} graphs in {time.monotonic() - started:.2f} s")

    def run(self, step: StepNumbers) -> Replayed | None:
        """Queues a step; the tokens it samples greedily are in last_tokens after it. None: no graph has room for it."""
        num_chunks = len(step.rows) - step.num_decodes
        num_tokens = len(step.input_ids) - step.num_decodes
        shape = self._shapes.fit(step.num_decodes, num_chunks, num_tokens, with_groups=step.groups is not None)
        found = None if shape is None else self._graphs.get(shape)
        if shape is None or found is None:
            return None
        self._receive(step, shape)
        found.replay()
        return Replayed(found.logits, found.tokens, step.places(shape))

    def _receive(self, step: StepNumbers, shape: GraphShape) -> None:
        """Queues the copy of a step's numbers into the memory that graphs read."""
        arrays: list[Array] = [*step.padded(shape, self._limits.max_num_seqs), step.block_tables]
        tables = self._uploads.send(arrays, self._received)[-1]
        num, width = step.num_decodes, tables.shape[1]
        self._block_tables[:num, :width].copy_(tables[:num])
        if num < tables.shape[0]:
            first = shape.num_decodes
            self._block_tables[first : first + tables.shape[0] - num, :width].copy_(tables[num:])

    def _body(self, shape: GraphShape) -> tuple[Tensor, Tensor]:
        offsets, counts = _offsets(shape), _counts(shape)
        input_ids, positions, slot_mapping, sample_indices, rows, cu_seqlens_q, seq_lens, *groups = (
            self._received[offset : offset + count * dtype.itemsize].view(dtype)
            for offset, count, dtype in zip(offsets, counts, _DTYPES, strict=False)
        )
        attention = AttentionBatch(
            slot_mapping=slot_mapping,
            block_tables=self._block_tables[: shape.num_rows],
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            num_decodes=shape.num_decodes,
            max_seqlen_q=max(1, shape.num_tokens),
            max_seqlen_k=self._limits.max_model_len,
            block_size=self._limits.block_size,
            shared=SharedPrefixes(*groups) if groups else None,
        )
        context = ForwardContext(attention, self._backend, self._layer_caches)
        ids = self._tokens.read(input_ids, self._last_tokens)
        logits = self._forward(context, ids, positions, sample_indices)
        return logits, self._tokens.choose(logits, rows, self._last_tokens)


def _counts(shape: GraphShape) -> Sequence[int]:
    """Lengths of the arrays of StepNumbers.padded."""
    counts = (*(shape.all_tokens,) * 3, *(shape.num_rows,) * 2, shape.num_rows + 1, shape.num_rows)
    return (*counts, *(shape.num_groups,) * 2, *(shape.num_decodes,) * 2) if shape.num_groups else counts


def _offsets(shape: GraphShape) -> Sequence[int]:
    """Where Uploads.send puts those arrays, and where what follows them."""
    offsets = [0]
    for count, dtype in zip(_counts(shape), _DTYPES, strict=False):
        offsets.append(offsets[-1] + -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT)
    return offsets


def _nothing() -> StepNumbers:
    """A step without sequences."""
    none = np.zeros(0, np.int64)
    no_lens = np.zeros(0, np.int32)
    return StepNumbers(
        none, none, none, none, np.zeros(0, np.bool_), np.zeros(1, np.int32), no_lens, np.zeros((0, 1), np.int32), 0
    )


_NOTHING = _nothing()
