"""Attention of prefill chunks: chooses between this package's kernel and the library's. Knows both, and host-side lengths.

The library's kernel is faster for long chunks, in forms that it knows; it takes one chunk per call. All other chunks go to
this package's kernel, neighbours in one launch.
"""

from torch import Tensor

from executor_svc.kernels.batch import AttentionBatch, LayerCache
from executor_svc.kernels.triton.library import GRID, Library, library_chunk
from executor_svc.kernels.triton.prefill_kernel import triton_prefill

_LONG = 1024
"""Tokens of a chunk that are worth an arrangement of their own."""


def packed_rows(batch: AttentionBatch) -> int | None:
    """Rows that heads of a batch should have together, num_tokens and padding, for a last chunk that is long; None: it is not.

    The library takes a chunk as it lies only if its number of rows is a multiple of GRID. A last chunk has room for that: rows of
    zeros behind it, which no token sees. So are queries, keys and values, if they have so many rows.
    """
    if batch.query_lens is None or batch.query_lens[-1] < _LONG or batch.num_decodes == batch.num_seqs:
        return None
    return batch.num_tokens + -batch.query_lens[-1] % GRID


def sole_chunk(
    library: Library,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor | None:
    """Attention of a batch that is one chunk for the library, without a copy of the result; None: it is not.

    Args: as paged_prefill. Returns [num_rows, num_heads, head_dim_v].
    """
    query_lens, kv_lens = batch.query_lens, batch.kv_lens
    if batch.num_seqs != 1 or query_lens is None or kv_lens is None or not library.is_worth(query_lens[0], kv_lens[0]):
        return None
    if not library.can(query, layer_cache, _effective(window, batch), softcap, sinks):
        return None
    return library_chunk(library, query, key, value, layer_cache, batch.block_tables[0], kv_lens[0] - query_lens[0], scale=scale)


def _effective(window: int | None, batch: AttentionBatch) -> int | None:
    """The window, or None if it is as wide as every sequence."""
    return None if window is not None and window >= batch.max_seqlen_k else window


def paged_prefill(
    library: Library,
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
        library: for long chunks.
        query: [num_rows, num_heads, head_dim_k] of the whole batch, and padding as in packed_rows; rows may be strided.
        key: [num_rows, num_kv_heads, head_dim_k] of the whole batch, rotated; rows may be strided.
        value: [num_rows, num_kv_heads, head_dim_v]; same.
        layer_cache: holds key and value already.
        batch: decodes first, then chunks. The library is used only where it has query_lens and kv_lens.
        out: [num_rows, num_heads, head_dim_v]; rows [batch.num_decodes, num_tokens) are written.
        scale: as in paged_decode.
        window: same.
        softcap: same.
        sinks: same.
    """
    first, query_lens, kv_lens = batch.num_decodes, batch.query_lens, batch.kv_lens

    def by_own_kernel(start: int, stop: int, start_token: int, stop_token: int) -> None:
        """Sequences [start, stop), whose tokens are [start_token, stop_token)."""
        if start < stop:
            triton_prefill(
                query[start_token:stop_token],
                layer_cache,
                batch.block_tables[start:stop],
                batch.cu_seqlens_q[start : stop + 1],
                batch.seq_lens[start:stop],
                out[start_token:stop_token],
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )

    window = _effective(window, batch)
    if query_lens is None or kv_lens is None or not library.can(query, layer_cache, window, softcap, sinks):
        by_own_kernel(first, batch.num_seqs, first, batch.num_tokens)
        return
    start, start_token, token = first, first, first
    for seq in range(first, batch.num_seqs):
        rows = slice(token, token + query_lens[seq])
        token = rows.stop
        if library.is_worth(query_lens[seq], kv_lens[seq]):
            by_own_kernel(start, seq, start_token, rows.start)
            start, start_token = seq + 1, rows.stop
            context = kv_lens[seq] - query_lens[seq]
            table = batch.block_tables[seq]
            of_chunk = rows if seq + 1 < batch.num_seqs else slice(rows.start, query.shape[0])
            found = library_chunk(
                library, query[of_chunk], key[of_chunk], value[of_chunk], layer_cache, table, context, scale=scale
            )
            out[rows] = found[: query_lens[seq]]
    by_own_kernel(start, batch.num_seqs, start_token, batch.num_tokens)
