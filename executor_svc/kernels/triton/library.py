"""Attention of a long chunk by the library's kernel (cuDNN), which wants keys and values one behind the other.

Knows contiguous tensors and the paged cache. Does not know which chunks are worth it (prefill.py does).

```
keys of the sequence     | context: gathered from its blocks, a piece at a time | the chunk's own, fresh |
queries of the chunk     | sees all of a piece: rectangle                       | causal: square         |
                           every part comes with its log-sum-exp, by which parts are joined
```
The library builds a plan of 50 ms and more for every new shape, unless it may round lengths up inside of the plan, which
is a switch of its own in the environment; it is read once, at the first use. Then torch makes offsets and lengths on the
device for every call, fifteen tiny kernels, which take the host 200 us and the GPU 30. It does so only for tensors whose rows
are dense, so the caller has the choice by layout:

    dense rows           any length, one plan for all lengths up to the next power of two
    rows with a stride   a plan for each shape, and nothing but the attention itself: for lengths on a grid
"""

import functools
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.triton.parts import gather, join

PIECE = 32_768
"""Keys of a context that are gathered at once: bounds the scratch memory."""
GRID = 512
"""Chunks whose number of rows is a multiple of this, and not too large, are attended to as they lie; each length has a plan."""
_SHORTEST_PLANNED, _LONGEST_PLANNED = 1024, 8192
_SHORTEST_PIECE = 16
log = logging.getLogger(__name__)


def allow_library() -> None:
    """Has the library build plans for rounded lengths; before its attention is used for the first time."""
    # The switch has no other place than the environment of this very process.
    os.environ["TORCH_CUDNN_SDPA_AVOID_RECOMPILE"] = "1"


def plan_ahead(device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Makes all plans for these heads now, in this thread, that their first long prompts would wait for."""
    if not _takes_heads(head_dim) or not _works(device, dtype, num_heads, num_kv_heads, head_dim):
        return
    row, key_row = (num_heads + 2 * num_kv_heads) * head_dim, num_kv_heads * head_dim
    for key_stride, causal in ((row, True), (key_row, False)):
        _plan(device, dtype, num_heads, num_kv_heads, head_dim, row, key_stride, causal)


class Library(Protocol):
    """Attention over contiguous keys and values, for chunks that are long enough."""

    def can(
        self, query: Tensor, layer_cache: LayerCache, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> bool:
        """Whether it computes this form of attention on this device."""
        ...

    def is_worth(self, query_len: int, kv_len: int) -> bool:
        """Whether it is faster than this package's kernel for a chunk of query_len tokens at the end of kv_len."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention of [1, num_heads, num_queries, head_dim] over keys and values [1, num_kv_heads, num_keys, head_dim].

        Returns:
            [1, num_heads, num_queries, head_dim], rows contiguous; and with_lse float32 [1, num_heads, num_queries, 1]: the
            natural logarithm of each row's sum of exponentials, any strides.
        """
        ...


class Cudnn:
    """cuDNN's attention, as torch ships it. Measured on an H200: as fast as ours from 2,000 tokens on, 1.6 times at 16,000."""

    def can(
        self, query: Tensor, layer_cache: LayerCache, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> bool:
        """See Library."""
        head_dim_k, head_dim_v = query.shape[2], layer_cache.value.shape[3]
        return (
            query.is_cuda
            and query.element_size() == 2
            and window is None
            and softcap is None
            and sinks is None
            and head_dim_k == head_dim_v
            and _takes_heads(head_dim_k)
            and _works(query.device, query.dtype, query.shape[1], layer_cache.value.shape[1], head_dim_k)
        )

    def is_worth(self, query_len: int, kv_len: int) -> bool:
        """See Library."""
        return query_len >= 1024 and query_len * (kv_len - query_len // 2) >= 3_000_000

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """See Library."""
        heads = query.shape[1], key.shape[1], query.shape[3]
        if not _is_dense(query):
            _plan(query.device, query.dtype, *heads, query.stride(2), key.stride(2), causal)
        elif not causal and with_lse:
            _plan_dense(query.device, query.dtype, *heads)
        return self._attend(query, key, value, scale, causal, with_lse)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, with_lse, 0.0, causal, False, scale=scale
        )[:2]
        return out, lse


def _takes_heads(head_dim: int) -> bool:
    return head_dim % 8 == 0 and head_dim <= 128


@functools.cache
def _works(device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether cuDNN's attention is there and takes calls for these heads."""
    query, keys = (
        _as_heads(torch.zeros(2048, heads, head_dim, dtype=dtype, device=device)) for heads in (num_heads, num_kv_heads)
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells once of each layout that it is an experiment
            Cudnn().attend(query, keys, keys, 1.0, causal=True, with_lse=True)
            Cudnn().attend(query, keys, keys, 1.0, causal=False, with_lse=True)
            strided = torch.zeros(GRID, num_heads + num_kv_heads, head_dim, dtype=dtype, device=device)
            query, keys = (_as_heads(part) for part in strided.split_with_sizes((num_heads, num_kv_heads), 1))
            Cudnn().attend(query, keys, keys, 1.0, causal=False, with_lse=True)
    except RuntimeError as error:
        log.warning("long prompts are slower than they could be, cuDNN attention does not run: %s", error)
        return False
    return True


@functools.cache
def _plan(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    stride: int,
    key_stride: int,
    causal: bool,
) -> None:
    """Has cuDNN plan, 60 ms each, all that is attended to as it lies, in the thread that calls: not within a request."""
    sizes = range(_SHORTEST_PLANNED, _LONGEST_PLANNED + 1, GRID)
    shapes = [(size, piece) for size in sizes for piece in ([size] if causal else planned_pieces(size))]
    query, keys = (
        torch.zeros(length, row // head_dim, head_dim, dtype=dtype, device=device)[:, :heads]
        for length, heads, row in (
            (_LONGEST_PLANNED, num_heads, stride),
            (max(piece for _, piece in shapes), num_kv_heads, key_stride),
        )
    )
    for size, piece in shapes:
        part = _as_heads(keys[:piece])
        Cudnn()._attend(_as_heads(query[:size]), part, part, 1.0, causal, True)


@functools.cache
def _plan_dense(device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """As _plan, for chunks and pieces of a context of any length: one plan for all up to the next power of two."""
    query, keys = (
        torch.zeros(length, heads, head_dim, dtype=dtype, device=device)
        for length, heads in ((_LONGEST_PLANNED, num_heads), (PIECE, num_kv_heads))
    )
    for size in _powers_of_two(2 * _SHORTEST_PLANNED, _LONGEST_PLANNED):
        for piece in _powers_of_two(_SHORTEST_PIECE, PIECE):
            part = _as_heads(keys[:piece])
            Cudnn()._attend(_as_heads(query[:size]), part, part, 1.0, False, True)


def _powers_of_two(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def is_planned(num_rows: int) -> bool:
    """Whether chunks of so many rows are attended to as they lie."""
    return num_rows % GRID == 0 and _SHORTEST_PLANNED <= num_rows <= _LONGEST_PLANNED


def planned_pieces(num_rows: int) -> tuple[int, ...]:
    """Numbers of keys in front of a chunk of so many rows that it is attended to as it lies with, the largest first.

    The middle of a long prompt goes in chunks of the largest size; what is planned for other sizes is for its end.
    """
    if not is_planned(num_rows) or num_rows < _LONGEST_PLANNED // 2:
        return ()
    return (32_768, 24_576, 16_384, 8192) if num_rows == _LONGEST_PLANNED else (24_576, 8192)


def library_chunk(
    library: Library,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_cache: LayerCache,
    block_table: Tensor,
    context: int,
    *,
    scale: float,
) -> Tensor:
    """Causal attention of one chunk over its context in the cache and its own keys.

    Args:
        library: computes the parts.
        query: [num_queries, num_heads, head_dim]; rows may be strided.
        key: [num_queries, num_kv_heads, head_dim] of the chunk itself, rotated; rows may be strided. The three are copied unless
            they are parts of the same rows and is_planned(num_queries). Then their last rows may be padding: finite, and not seen
            by the rows before.
        value: same.
        layer_cache: as in paged_decode.
        block_table: int32 [max_blocks] of the sequence.
        context: keys before the chunk.
        scale: scores are multiplied by it.

    Returns:
        [num_queries, num_heads, head_dim], contiguous.
    """
    asked, num_queries = query.shape[0], -(-query.shape[0] // GRID) * GRID
    if is_planned(num_queries) and query.shape[2] == value.shape[2]:
        arrange = _as_heads
        if asked < num_queries or not _are_packed(query, key, value):
            query, key, value = _packed(query, key, value, num_queries)
    else:
        arrange, num_queries = _as_dense_heads, asked
    queries = arrange(query)
    # With sums or without them are two plans, and the sums cost nothing.
    total, total_lse = library.attend(queries, arrange(key), arrange(value), scale, causal=True, with_lse=True)
    for start, length in pieces(num_queries, context):
        if length not in planned_pieces(num_queries):
            queries = _as_dense_heads(queries[0].transpose(0, 1))
        keys, values = gather(layer_cache, block_table, start, length, query.dtype)
        part, part_lse = library.attend(queries, _as_heads(keys), _as_heads(values), scale, causal=False, with_lse=True)
        join(total, total_lse, part, part_lse)
    out = total[0].transpose(0, 1)
    return out if asked == num_queries else out[:asked]


def _are_packed(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether queries, keys and values of a token may be parts of one row."""
    return query.stride(0) == key.stride(0) == value.stride(0) > query.shape[1] * query.shape[2]


def _packed(query: Tensor, key: Tensor, value: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copies with queries, keys and values of a token in one row, and rows of zeros up to num_rows."""
    num_tokens, sizes = query.shape[0], (query.shape[1], key.shape[1], value.shape[1])
    heads = query.new_empty(num_rows, sum(sizes), query.shape[2])
    torch.cat([query, key, value], 1, out=heads[:num_tokens])
    heads[num_tokens:].zero_()
    query, key, value = heads.split_with_sizes(sizes, 1)
    return query, key, value


def pieces(num_queries: int, context: int) -> Iterator[tuple[int, int]]:
    """A context cut up: start and length of each piece, planned ones first."""
    start = 0
    for length in planned_pieces(num_queries):
        while context - start >= length:
            yield start, length
            start += length
    for rest in range(start, context, PIECE):
        yield rest, min(PIECE, context - rest)


def _as_heads(rows: Tensor) -> Tensor:
    """[num_tokens, num_heads, head_dim] as [1, num_heads, num_tokens, head_dim]."""
    return rows.transpose(0, 1).unsqueeze(0)


def _as_dense_heads(rows: Tensor) -> Tensor:
    """As _as_heads, over contiguous rows: a copy where they are not."""
    return _as_heads(rows.contiguous())


def _is_dense(heads: Tensor) -> bool:
    """Whether heads [1, num_heads, num_tokens, head_dim] lie as _as_dense_heads makes them."""
    return heads.transpose(1, 2).is_contiguous()
