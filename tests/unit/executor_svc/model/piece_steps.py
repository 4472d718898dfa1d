"""Steps of several chunks and decodes over a small stacked model, with pieces and without."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from executor_svc.kernels.backend import Backend
from executor_svc.kernels.batch import AttentionBatch, LayerCache
from executor_svc.kernels.layout import KvLayout
from executor_svc.model.forward_context import ForwardContext, use
from executor_svc.model.self_check import packed_batch

BLOCK_SIZE, NUM_BLOCKS = 4, 600
Part = tuple[int, int, int]
"""Sequence, first token, end."""


def poisoned_caches(
    config: Any, num_layers: int, dtype: torch.dtype, device: torch.device, layout: KvLayout
) -> dict[int, LayerCache]:
    """By layer, as a runner has them; what no step has written is far off."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = (config.num_key_value_heads, head_dim, BLOCK_SIZE)
    shapes = [(NUM_BLOCKS, *shape(*sizes)) for shape in (layout.key_shape, layout.value_shape)]

    def part(shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, 1e4, dtype=dtype, device=device)

    return {layer: LayerCache(*map(part, shapes)) for layer in range(num_layers)}


def steps_of(lengths: Sequence[int]) -> list[list[Part]]:
    """All prompts at once; the first two decode while a later one, of the same length as the last, goes on; then decodes."""
    prompts = [(seq, 0, length) for seq, length in enumerate(lengths)]
    last, long = len(lengths) - 1, lengths[-1]
    return [prompts, [*((seq, length, length + 1) for seq, length in enumerate(lengths[:2])), (last, long, 2 * long)]]


@torch.inference_mode()
def logits_of(model: Any, caches: dict[int, LayerCache], steps: Sequence[Sequence[Part]], backend: Backend) -> Tensor:
    """Of the last token of every sequence in every step."""
    device = next(iter(caches.values())).key.device
    num_seqs = 1 + max(seq for step in steps for seq, _, _ in step)
    width = 1 + max(end for step in steps for _, _, end in step) // BLOCK_SIZE
    tables = [list(range(seq * width, (seq + 1) * width)) for seq in range(num_seqs)]
    assert num_seqs * width <= NUM_BLOCKS
    found = []
    for step in steps:
        batch = packed_batch(list(step), tables, block_size=BLOCK_SIZE)
        lengths = [end - start for _, start, end in step]
        batch = replace(on(device, batch), query_lens=lengths, kv_lens=[end for _, _, end in step])
        ids = torch.cat([(torch.arange(start, end) * 7 + seq * 11) % 120 + 3 for seq, start, end in step]).to(device)
        positions = torch.cat([torch.arange(start, end) for _, start, end in step]).to(device)
        keep = batch.cu_seqlens_q[1:].long() - 1
        with use(ForwardContext(batch, backend, caches)):
            out = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=keep)
        found.append(out.logits[0].float().clone())
    return torch.cat(found)


def on(device: torch.device, batch: AttentionBatch) -> AttentionBatch:
    """The batch with its tensors there."""
    values: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(batch, **moved)
