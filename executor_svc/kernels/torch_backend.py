"""Paged attention in plain torch operations: works on every machine, used where the compiled kernels cannot be.

One pass over the sequences per layer, each gathering its own KV: right, not fast.
"""

import torch
from torch import Tensor

from executor_svc.kernels.batch import AttentionBatch, LayerCache, Rotary
from executor_svc.kernels.reference import gather_kv, rotate, visible_keys, write_kv


class TorchBackend:
    """The slow backend, and the one the fast ones are compared with."""

    name = "torch"
    kv_layout_version = "k-hds.v-hsd/1"

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
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        write_kv(key, value, layer_cache, batch)
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        out = query.new_empty(query.shape[0], num_heads, value.shape[2])
        bounds = batch.cu_seqlens_q.tolist()
        for seq in range(batch.num_seqs):
            start, end = bounds[seq], bounds[seq + 1]
            num_queries = end - start
            keys, values = gather_kv(layer_cache, batch, seq)
            grouped = query[start:end].float().reshape(num_queries, num_kv_heads, -1, query.shape[2])
            scores = torch.einsum("qhgd,khd->hgqk", grouped, keys.float()) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            visible = visible_keys(num_queries, keys.shape[0], window, query.device)
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                column = sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, num_queries, 1)
                scores = torch.cat([scores, column], dim=3)
            weights = torch.softmax(scores, dim=3)[..., : keys.shape[0]]
            out[start:end] = torch.einsum("hgqk,khd->qhgd", weights, values.float()).flatten(1, 2).to(out.dtype)
        return out
