"""Decode steps as CUDA graphs: captured once per batch size, replayed with other numbers in the same memory.

Knows the model, the layers' caches and shapes. Does not know sequences or plans. A batch is padded up to the next size;
padding rows have no keys (seq_len 0), no slot (-1), and give their token to the spare row.

    numbers of the step -> one copy into static memory -> graph: last tokens -> model -> logits -> largest -> last tokens
"""

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor_svc.core.plan import BatchLimits
from executor_svc.cuda.sampler import TokenEnds
from executor_svc.cuda.stream import DeviceStream
from executor_svc.cuda.upload import Array, Uploads
from executor_svc.kernels.backend import Backend
from executor_svc.kernels.batch import AttentionBatch, LayerCache
from executor_svc.model.forward_context import ForwardContext

log = logging.getLogger(__name__)
Forward = Callable[[ForwardContext, Tensor, Tensor, Tensor], Tensor]
Ints = npt.NDArray[np.int64]
_BYTES_PER_ROW = 4 * 8 + 4
"""Of the numbers that are copied for each row, its block table not counted."""
_SLACK = 16 * 8


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph, ascending, up to the first that holds max_num_seqs."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(320, 1025, 64)]
    sizes += range(1280, max_num_seqs + 256, 256)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The numbers of a decode step, one entry per sequence; they become those of one size's graph.

    Attributes:
        input_ids: int64 [n], -row - 1 for a token that only the device knows.
        positions, slot_mapping, rows: int64 [n].
        seq_lens: int32 [n].
        block_tables: int32 [n, width].
    """

    input_ids: Ints
    positions: Ints
    slot_mapping: Ints
    rows: Ints
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]

    def padded(self, size: int, spare_row: int) -> "DecodeRows":
        """With padding rows up to size."""
        missing = size - len(self.rows)
        if missing == 0:
            return self

        def pad(column: npt.NDArray[np.int64], value: int) -> npt.NDArray[np.int64]:
            return np.concatenate([column, np.full(missing, value, np.int64)])

        return DecodeRows(
            input_ids=pad(self.input_ids, 0),
            positions=pad(self.positions, 0),
            slot_mapping=pad(self.slot_mapping, -1),
            rows=pad(self.rows, spare_row),
            seq_lens=np.concatenate([self.seq_lens, np.zeros(missing, np.int32)]),
            block_tables=self.block_tables,
        )


@dataclass(frozen=True, slots=True)
class _Graph:
    """One size's graph.

    Attributes:
        logits: [size, vocab_size], good from a replay until the next one of any size.
        tokens: int64 [size], same.
    """

    replay: Callable[[], None]
    logits: Tensor
    tokens: Tensor


class DecodeGraphs:
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
        self._sizes = graph_sizes(limits.max_num_seqs)
        self._graphs: dict[int, _Graph] = {}
        largest = self._sizes[-1]
        self._width = -(-(limits.max_model_len + 1) // limits.block_size)
        self._received = torch.zeros(largest * (_BYTES_PER_ROW + 4 * self._width) + _SLACK, dtype=torch.uint8, device=device)
        self._block_tables = torch.zeros(largest, self._width, dtype=torch.int32, device=device)
        self._indices = torch.arange(largest + 1, device=device)
        self._cu_seqlens = torch.arange(largest + 1, dtype=torch.int32, device=device)

    @property
    def num_graphs(self) -> int:
        """Graphs that exist."""
        return len(self._graphs)

    def capture(self, progress: Callable[[str], None]) -> None:
        """Captures every size, the largest first, so that the others fit into its memory.

        Raises:
            Exception: whatever the model does that cannot be captured.
        """
        started = time.monotonic()
        with self._stream.use(), torch.inference_mode():
            for size in reversed(self._sizes):
                self._receive(self._idle_rows(size))
                self._body(size)  # compiles kernels, and takes memory that lives longer than a step
                self._stream.check()
                replay, (logits, tokens) = self._stream.capture(functools.partial(self._body, size))
                self._graphs[size] = _Graph(replay, logits, tokens)
            self._uploads.guard(self._stream.mark())
            self._stream.check()
        progress(f"captured {len(self._graphs)} decode graphs in {time.monotonic() - started:.2f} s")

    def run(self, step: DecodeRows) -> tuple[Tensor, Tensor] | None:
        """Queues a decode step; the tokens it samples greedily are in last_tokens after it.

        Returns:
            Logits [n, vocab_size] and the tokens int64 [n] of the largest, good until the next step; None: no graph is that
            large.
        """
        num_rows = len(step.rows)
        size = self._size_for(num_rows)
        found = None if size is None else self._graphs.get(size)
        if size is None or found is None:
            return None
        self._receive(step.padded(size, self._limits.max_num_seqs))
        found.replay()
        return found.logits[:num_rows], found.tokens[:num_rows]

    def _size_for(self, num_rows: int) -> int | None:
        return next((size for size in self._sizes if size >= num_rows), None)

    def _idle_rows(self, size: int) -> DecodeRows:
        """A step of padding only."""
        none = np.zeros(0, np.int64)
        rows = DecodeRows(none, none, none, none, np.zeros(0, np.int32), np.zeros((0, 1), np.int32))
        return rows.padded(size, self._limits.max_num_seqs)

    def _receive(self, step: DecodeRows) -> None:
        """Queues the copy of a padded step's numbers into the memory that graphs read."""
        arrays: list[Array] = [step.input_ids, step.positions, step.slot_mapping, step.rows, step.seq_lens, step.block_tables]
        tables = self._uploads.send(arrays, self._received)[-1]
        self._block_tables[: tables.shape[0], : tables.shape[1]].copy_(tables)

    def _views(self, size: int) -> Sequence[Tensor]:
        """Where _receive puts the numbers of a step of that size, block tables not counted."""
        views, offset = [], 0
        for dtype in (torch.int64, torch.int64, torch.int64, torch.int64, torch.int32):
            num_bytes = size * dtype.itemsize
            views.append(self._received[offset : offset + num_bytes].view(dtype))
            offset += -(-num_bytes // 16) * 16
        return views

    def _body(self, size: int) -> tuple[Tensor, Tensor]:
        input_ids, positions, slot_mapping, rows, seq_lens = self._views(size)
        attention = AttentionBatch(
            slot_mapping=slot_mapping,
            block_tables=self._block_tables[:size],
            cu_seqlens_q=self._cu_seqlens[: size + 1],
            seq_lens=seq_lens,
            num_decodes=size,
            max_seqlen_q=1,
            max_seqlen_k=self._limits.max_model_len,
            block_size=self._limits.block_size,
        )
        context = ForwardContext(attention, self._backend, self._layer_caches)
        ids = self._tokens.read(input_ids, self._last_tokens)
        logits = self._forward(context, ids, positions, self._indices[:size])
        return logits, self._tokens.choose(logits, rows, self._last_tokens)
