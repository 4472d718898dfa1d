"""Weights out of nothing, for benchmarks and tests of any config. Knows modules and a seed, no files."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights


def build_random(config: Any, dtype: torch.dtype, seed: int, device: torch.device | None = None) -> nn.Module:
    """A causal language model with weights drawn from the seed; logits are finite.

    Matrices are normal with the config's initializer_range; norms, biases and sinks get what their class wants. On a GPU the
    weights are made there, and are others than a CPU makes of the same seed.

    Args:
        config: a transformers config.
        dtype: of the weights.
        seed: of the draws.
        device: where the model lives; None: the CPU.
    """
    device = device or torch.device("cpu")
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(seed)
        with no_init_weights(), device:
            model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
        std = float(getattr(config.get_text_config(), "initializer_range", None) or 0.02)
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, std)
                parameter._is_hf_initialized = True
        model.initialize_weights()
        model.tie_weights()
    module: nn.Module = model
    return module
