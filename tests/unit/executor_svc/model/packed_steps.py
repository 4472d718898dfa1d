"""A step as a decoder layer's attention gets it: one row of heads per token, embedded by angles of 0."""

import torch
from torch import Tensor

from executor_svc.kernels.backend import Backend
from executor_svc.model.cuda_functions import triton_attention
from executor_svc.model.forward_context import AttentionCall, ForwardContext
from executor_svc.model.stack_parts import AttentionPart, RotaryTable
from tests.unit.executor_svc.kernels.batches import Step


def attend_packed(backend: Backend, step: Step, scale: float, window: int | None = None) -> Tensor:
    """triton_attention of the step: [num_tokens, num_heads, head_dim]."""
    head_dim, device = step.query.shape[2], step.query.device
    ones = torch.ones(4, head_dim, device=device)
    part = AttentionPart(
        AttentionCall(0, scale, window),
        step.query.shape[1],
        step.key.shape[1],
        head_dim,
        RotaryTable(ones, torch.zeros_like(ones)),
    )
    qkv = torch.cat([step.query, step.key, step.value], 1).flatten(1)
    positions = torch.arange(qkv.shape[0], device=device) % 4
    out = triton_attention(qkv, positions, part, ForwardContext(step.batch, backend, [step.cache]))
    assert out.is_contiguous()
    return out.view(step.query.shape)
