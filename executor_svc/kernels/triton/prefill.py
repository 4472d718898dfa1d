"""Attention of prefill chunks: chooses between this package's kernel and the library's. Knows both, and host-side lengths."""

from torch import Tensor

from executor_svc.kernels.batch import AttentionBatch, LayerCache
from executor_svc.kernels.triton.prefill_kernel import triton_prefill


def paged_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_cache: LayerCache,
    batch: AttentionBatch,
    out: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Causal attention of the chunks of a batch, whose KV is in the cache already; decodes in front are left out.

    Args:
        query: [num_tokens, num_heads, head_dim_k] of the whole batch; rows may be strided.
        key: [num_tokens, num_kv_heads, head_dim_k] of the whole batch, rotated.
        value: [num_tokens, num_kv_heads, head_dim_v].
        layer_cache: holds key and value already.
        batch: decodes first, then chunks.
        out: [num_tokens, num_heads, head_dim_v]; rows [batch.num_decodes, num_tokens) are written.
        scale: as in paged_decode.
        window: same.
        softcap: same.
        sinks: same.
    """
    first = batch.num_decodes
    triton_prefill(
        query[first:],
        layer_cache,
        batch.block_tables[first:],
        batch.cu_seqlens_q[first:],
        batch.seq_lens[first:],
        out[first:],
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
