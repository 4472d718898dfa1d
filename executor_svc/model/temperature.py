"""Attention temperature by position, made safe for packed batches. Knows one habit of transformers' layers, no model by name.

Such a layer multiplies its queries by a factor that is 1 up to a length, floor_scale, and takes the position from the place in
the batch, which is wrong when sequences are packed. Models are served below that length only (gates.py), where the factor is 1.
"""

from torch import nn


def switch_off_temperature(model: nn.Module) -> int:
    """Switches the factor off in every layer that has it; returns how many."""
    found = [module for module in model.modules() if getattr(module, "attn_temperature_tuning", False)]
    for module in found:
        setattr(module, "attn_temperature_tuning", False)  # noqa: B010 - modules are typed as tensors or modules
    return len(found)
