"""The attention function that transformers' layers call. Knows transformers' calling convention, no kernel and no cache.

It turns the call into packed views and hands it to the current forward context. A keyword argument that would change
the result and is not understood here raises: a model must never be served with half of its semantics.
"""

import torch
from torch import nn
from transformers import AttentionInterface

from executor_svc.model.forward_context import AttentionCall, current

ATTENTION_NAME = "octavo_paged"

_HARMLESS_TENSORS = frozenset({"position_ids", "cos", "sin", "position_embeddings"})
"""Tensors that layers pass along although rotary embedding has been applied already."""


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the current forward context.

    Args:
        module: the layer's attention; its layer_idx names the cache.
        query: [1, num_query_heads, num_tokens, head_dim_k], rotated.
        key: [1, num_kv_heads, num_tokens, head_dim_k], rotated.
        value: [1, num_kv_heads, num_tokens, head_dim_v].
        attention_mask: None; the batch's metadata says who sees whom.
        scaling: of the scores; None: head_dim_k ** -0.5.
        dropout: must be 0 (eval mode).
        sliding_window: as AttentionCall.window.
        softcap: as AttentionCall.softcap.
        s_aux: as AttentionCall.sinks.
        kwargs: passed along by layers; unknown tensors are refused.

    Returns:
        [1, num_tokens, num_query_heads, head_dim_v], and None for the attention weights.

    Raises:
        ValueError: the layer passes something that this attention would lose.
    """
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} passes an attention mask, which paged attention would lose")
    if dropout:
        raise ValueError(f"{type(module).__name__} asks for dropout {dropout}; the model is not in eval mode")
    for name, argument in kwargs.items():
        if name not in _HARMLESS_TENSORS and isinstance(argument, torch.Tensor):
            raise ValueError(f"{type(module).__name__} passes {name} to its attention, which is not supported")
    if getattr(module, "is_causal", True) is False:
        raise ValueError(f"{type(module).__name__} is not causal: it attends in both directions")
    layer_idx = getattr(module, "layer_idx", None)
    if layer_idx is None:
        raise ValueError(f"{type(module).__name__} does not know its layer number")
    call = AttentionCall(
        layer_idx=int(layer_idx),
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    out = current().attend(call, _packed(query), _packed(key), _packed(value))
    return out.unsqueeze(0), None


def _packed(heads: torch.Tensor) -> torch.Tensor:
    """[1, num_heads, num_tokens, head_dim] as [num_tokens, num_heads, head_dim], the last two dimensions contiguous.

    Most layers pass a transposed view of packed rows, which costs nothing here; a few pass contiguous heads.
    """
    rows = heads[0].transpose(0, 1)
    return rows if rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] else rows.contiguous()


def register_attention() -> None:
    """Makes the function known to transformers by ATTENTION_NAME. May be called more than once.

    No mask function is registered for the name, so transformers builds no mask.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
