"""Paged attention said as plainly as possible, in float64: what every backend is tested against.

Loops over sequences and heads. Never used to serve.
"""

import torch
from torch import Tensor

from executor_svc.kernels.batch import AttentionBatch, LayerCache, Rotary


def rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Heads [num_tokens, num_heads, head_dim] with the rotary embedding applied to their first rotary_dim dimensions."""
    rotary_dim = rotary.cos.shape[1]
    turned, rest = heads[..., :rotary_dim], heads[..., rotary_dim:]
    low, high = turned.chunk(2, dim=2)
    turned = turned * rotary.cos[:, None] + torch.cat([-high, low], dim=2) * rotary.sin[:, None]
    return torch.cat([turned, rest], dim=2)


def write_kv(key: Tensor, value: Tensor, layer_cache: LayerCache, batch: AttentionBatch) -> None:
    """Writes key and value [num_tokens, num_kv_heads, head_dim] of the step's tokens into their slots."""
    block_ids = torch.div(batch.slot_mapping, batch.block_size, rounding_mode="floor")
    offsets = batch.slot_mapping % batch.block_size
    layer_cache.key[block_ids, :, :, offsets] = key.to(layer_cache.key.dtype)
    layer_cache.value[block_ids, :, offsets] = value.to(layer_cache.value.dtype)


def gather_kv(layer_cache: LayerCache, batch: AttentionBatch, seq: int) -> tuple[Tensor, Tensor]:
    """Keys [seq_len, num_kv_heads, head_dim_k] and values [seq_len, num_kv_heads, head_dim_v] of one sequence."""
    seq_len = int(batch.seq_lens[seq])
    num_blocks = -(-seq_len // batch.block_size)
    block_ids = batch.block_tables[seq, :num_blocks].long()
    key = layer_cache.key[block_ids].permute(0, 3, 1, 2).flatten(0, 1)[:seq_len]
    value = layer_cache.value[block_ids].permute(0, 2, 1, 3).flatten(0, 1)[:seq_len]
    return key, value


def visible_keys(num_queries: int, seq_len: int, window: int | None, device: torch.device | None = None) -> Tensor:
    """Which keys the last num_queries positions of a sequence see: bool [num_queries, seq_len]."""
    query_positions = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    key_positions = torch.arange(seq_len, device=device)[None, :]
    visible = key_positions <= query_positions
    if window is not None:
        visible &= key_positions > query_positions - window
    return visible


def reference_paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    rotary: Rotary | None = None,
) -> Tensor:
    """As Backend.paged_attention; the result is float64."""
    if rotary is not None:
        query, key = rotate(query, rotary), rotate(key, rotary)
    write_kv(key, value, layer_cache, batch)
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    out = torch.empty(query.shape[0], num_heads, value.shape[2], dtype=torch.float64)
    for seq in range(batch.num_seqs):
        start, end = int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1])
        keys, values = (t.double() for t in gather_kv(layer_cache, batch, seq))
        visible = visible_keys(end - start, keys.shape[0], window)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = query[start:end, head].double() @ keys[:, kv_head].T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double().expand(end - start, 1)], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : keys.shape[0]]
            out[start:end, head] = weights @ values[:, kv_head]
    return out
