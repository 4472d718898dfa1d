"""The CPU's attention backend: turns tensors into the arguments of the compiled kernels.

Knows strides and scratch memory. Does not know models or requests. Not for several threads at once: one scratch.
"""

import torch
from torch import Tensor

from executor_svc.kernels.batch import AttentionBatch, LayerCache, Rotary
from executor_svc.kernels.cpu.attention import SPAN, SUBTILE, attention_bf16, attention_f32
from executor_svc.kernels.cpu.compile import Kernel

_TILE_ROWS = 48
"""Queries x heads of an item; their scores stay in the second-level cache."""
_MIN_KEYS_PER_SPLIT = 2 * SPAN


class CpuBackend:
    """Paged attention on the CPU, over caches in float32 or bfloat16."""

    name = "cpu"
    kv_layout_version = "k-hds.v-hsd/1"

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._partials = torch.empty(0)

    def paged_attention(
        self,
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
        rotary: Rotary | None = None,
    ) -> Tensor:
        """See Backend.paged_attention."""
        dtype = query.dtype
        # The kernel takes float32 whatever the cache is: a key is rotated first and rounded once.
        floats = query.float(), key.float(), value.float()
        query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in floats)
        if rotary is not None:
            rotary = Rotary(rotary.cos.float(), rotary.sin.float())
        if sinks is not None:
            sinks = sinks.float().contiguous()
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        run, fields = self.arguments(
            (query, key, value, out), layer_cache, batch, scale=scale, window=window, softcap=softcap, sinks=sinks, rotary=rotary
        )
        run(*fields, threads=torch.get_num_threads())
        return out.to(dtype)

    def arguments(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        layer_cache: LayerCache,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        rotary: Rotary | None,
    ) -> tuple[Kernel, tuple[float, ...]]:
        """The kernel of paged_attention and its fields, good until the next call; for callers that run several kernels at once.

        tensors are query, key, value and out, float32: the last dimension of the first three and all of out contiguous. sinks
        are float32 and contiguous. The rest is as in Backend.paged_attention.
        """
        query, key, value, out = tensors
        num_tokens, num_heads, dim_k = query.shape
        num_kv_heads, dim_v = key.shape[1], value.shape[2]
        threads = torch.get_num_threads()
        group = num_heads // num_kv_heads
        tile_queries = max(1, _TILE_ROWS // group)
        scratch, scratch_bytes = self._scratch_for(tile_queries * group, dim_k, dim_v, threads)
        num_splits = self._num_splits(batch, num_kv_heads, threads)
        partials = self._partials_for(batch.num_decodes * num_heads * num_splits, dim_v) if num_splits > 1 else 0
        cache_key, cache_value = layer_cache.key, layer_cache.value
        run = attention_f32 if cache_key.dtype == torch.float32 else attention_bf16
        itemsize = cache_key.itemsize
        return run, (
            query.data_ptr(),
            query.stride(0) * 4,
            query.stride(1) * 4,
            key.data_ptr(),
            key.stride(0) * 4,
            key.stride(1) * 4,
            value.data_ptr(),
            value.stride(0) * 4,
            value.stride(1) * 4,
            rotary.cos.data_ptr() if rotary is not None else 0,
            rotary.sin.data_ptr() if rotary is not None else 0,
            rotary.cos.shape[1] if rotary is not None else 0,
            cache_key.data_ptr(),
            cache_value.data_ptr(),
            cache_key.stride(0) * itemsize,
            cache_value.stride(0) * itemsize,
            batch.slot_mapping.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.block_tables.stride(0),
            batch.cu_seqlens_q.data_ptr(),
            batch.seq_lens.data_ptr(),
            batch.seq_lens.shape[0],
            batch.num_decodes,
            num_tokens,
            batch.block_size,
            num_heads,
            num_kv_heads,
            dim_k,
            dim_v,
            window or 0,
            sinks.data_ptr() if sinks is not None else 0,
            out.data_ptr(),
            scratch,
            scratch_bytes,
            tile_queries,
            num_splits,
            partials,
            scale,
            softcap or 0.0,
        )

    def _num_splits(self, batch: AttentionBatch, num_kv_heads: int, threads: int) -> int:
        """Parts that each decode's keys are cut into: enough to occupy the threads, none too short."""
        items = batch.num_decodes * num_kv_heads
        if threads == 1 or items == 0 or items >= 4 * threads or batch.max_seqlen_k < 2 * _MIN_KEYS_PER_SPLIT:
            return 1
        return min(batch.max_seqlen_k // _MIN_KEYS_PER_SPLIT, -(-4 * threads // items))

    def _scratch_for(self, rows: int, dim_k: int, dim_v: int, threads: int) -> tuple[int, int]:
        """Address and bytes per thread of the kernel's scratch; see attend in attention.py."""
        acc_width = -(-dim_v // (2 * SUBTILE)) * 2 * SUBTILE
        padded_k, padded_rows = -(-dim_k // 16) * 16, -(-rows // 16) * 16
        gathered = 2 * SUBTILE * max(dim_k, acc_width)
        floats = rows * (padded_k + SPAN + acc_width) + 2 * padded_rows + gathered
        bytes_per_thread = -(-4 * floats // 4096) * 4096
        if self._scratch.shape[0] < threads * bytes_per_thread + 64:
            self._scratch = torch.empty(threads * bytes_per_thread + 64, dtype=torch.uint8)
        return -(-self._scratch.data_ptr() // 64) * 64, bytes_per_thread

    def _partials_for(self, parts: int, dim_v: int) -> int:
        """Address of room for the parts of split decodes."""
        floats = parts * (-(-dim_v // (2 * SUBTILE)) + 1) * 2 * SUBTILE
        if self._partials.shape[0] < floats:
            self._partials = torch.empty(floats)
        return self._partials.data_ptr()
