"""Rotary embedding of type "longrope", made safe for packed batches. Knows no model by name.

Such a model has two sets of frequencies, one for sequences up to its original length and one for longer ones. transformers
chooses the set from the longest position of the whole batch, so one long request would change all others. Here each token
takes the set of its own sequence, by the length that the sequence is known to reach: chunks of one prompt agree.
"""

from typing import Any

import torch
from torch import Tensor, nn

from executor_svc.model import forward_context


class PerSequenceRotary(nn.Module):
    """Stands in front of a model's rotary embedding; hands everything to it outside a forward context.

    Attributes:
        inner: the model's own.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each token.

        Args:
            x: names dtype and device.
            position_ids: [1, num_tokens].
            layer_type: of models that rotate differently by layer type.

        Returns:
            Two of [1, num_tokens, rotary_dim], the dtype of x.
        """
        layer = () if layer_type is None else (layer_type,)
        rope = self._rope(layer_type)
        if not forward_context.is_active() or rope.get("rope_type") != "longrope":
            own: tuple[Tensor, Tensor] = self.inner(x, position_ids, *layer)
            return own
        original = int(rope["original_max_position_embeddings"])
        is_long = forward_context.current().token_rope_lens() > original
        # The inner module chooses by the largest position it is shown: show it none, or one, beyond the original length.
        if not bool(is_long.any()):
            short: tuple[Tensor, Tensor] = self.inner(x, position_ids, *layer)
            return short
        beyond = torch.cat((position_ids, position_ids.new_full((1, 1), original)), dim=1)
        long_cos, long_sin = (part[:, :-1] for part in self.inner(x, beyond, *layer))
        if bool(is_long.all()):
            return long_cos, long_sin
        cos, sin = self.inner(x, position_ids.clamp(max=original - 1), *layer)
        chosen = is_long[None, :, None]
        return torch.where(chosen, long_cos, cos), torch.where(chosen, long_sin, sin)

    def _rope(self, layer_type: str | None) -> Any:
        inner: Any = self.inner
        rope = inner.config.rope_parameters
        return rope if layer_type is None else rope[layer_type]


def make_rotary_per_sequence(model: nn.Module) -> int:
    """Wraps every "longrope" rotary embedding of the model; returns how many there are."""
    found = [
        (parent, name, child) for parent in model.modules() for name, child in parent.named_children() if _is_longrope(child)
    ]
    for parent, name, child in found:
        setattr(parent, name, PerSequenceRotary(child))
    return len(found)


def _is_longrope(module: nn.Module) -> bool:
    """Whether it is a rotary embedding of transformers whose frequencies depend on length."""
    rope_type = getattr(module, "rope_type", None)
    return rope_type == "longrope" or (isinstance(rope_type, dict) and "longrope" in rope_type.values())
