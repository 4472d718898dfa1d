"""The step that is running now, where the attention of every layer finds it. Knows no model and no kernel.

transformers' layers drop or rename keyword arguments on their way down, so the step's metadata travels beside the call:
the runner enters a context for one forward pass, the registered attention function reads it. One forward pass runs at a
time in a process, so a module global is enough.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from executor_svc.kernels.backend import Backend
from executor_svc.kernels.batch import AttentionBatch, LayerCache, Rotary


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks of attention, beside its tensors.

    Attributes:
        layer_idx: the layer's number in the model.
        scale: multiplies query · key.
        window: a key is visible if its position > the query's - window; None: all before.
        softcap: scores become softcap * tanh(score / softcap); None: unchanged.
        sinks: float [num_query_heads], the score of one extra column per head that attends to nothing; None: none.
        rotary: embedding that attention applies to query and key; None: they come rotated.
    """

    layer_idx: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    rotary: Rotary | None = None


class ForwardContext:
    """One forward pass: the packed batch, the backend that computes attention, and the cache of every layer.

    Attributes:
        batch: of this step.
        backend: computes attention.
        layer_caches: by layer number.
        rope_lens: int [num_seqs], for models whose rotary frequencies depend on the sequence's length: the length that each
            sequence is known to reach (all its known tokens, not only this chunk). None: batch.seq_lens.
    """

    def __init__(
        self,
        batch: AttentionBatch,
        backend: Backend,
        layer_caches: Mapping[int, LayerCache] | Sequence[LayerCache],
        rope_lens: torch.Tensor | None = None,
    ) -> None:
        self.batch = batch
        self.backend = backend
        self.layer_caches = layer_caches
        self.rope_lens = rope_lens

    def layer_cache(self, layer_idx: int) -> LayerCache:
        """The paged cache of a layer."""
        return self.layer_caches[layer_idx]

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Writes keys and values into the cache and computes attention.

        Args:
            call: which layer, and how.
            query: [num_tokens, num_query_heads, head_dim_k].
            key: [num_tokens, num_kv_heads, head_dim_k].
            value: [num_tokens, num_kv_heads, head_dim_v].

        Returns:
            [num_tokens, num_query_heads, head_dim_v].
        """
        return self.backend.paged_attention(
            query,
            key,
            value,
            self.layer_cache(call.layer_idx),
            self.batch,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
            rotary=call.rotary,
        )

    def note_attended(self, layer_idx: int) -> None:
        """A layer attended without attend: the kernels ran several layers at once."""

    def token_rope_lens(self) -> torch.Tensor:
        """Per token of the packed batch: the length its sequence is known to reach. int64 [num_tokens]."""
        lens = self.batch.seq_lens if self.rope_lens is None else self.rope_lens
        return torch.repeat_interleave(lens.long(), self.batch.cu_seqlens_q.long().diff())


_current: ForwardContext | None = None


def current() -> ForwardContext:
    """The context of the running forward pass.

    Raises:
        RuntimeError: no forward pass is running.
    """
    if _current is None:
        raise RuntimeError("paged attention was called outside a forward context")
    return _current


def is_active() -> bool:
    """Whether a forward pass through the paged cache is running."""
    return _current is not None


@contextmanager
def use(context: ForwardContext) -> Iterator[ForwardContext]:
    """Makes the context current while the with block runs; contexts do not nest."""
    global _current
    if _current is not None:
        raise RuntimeError("a forward pass is running already")
    _current = context
    try:
        yield context
    finally:
        _current = None
