"""In which dtype a model computes. Knows names and devices; torch, but not transformers, which takes seconds to import."""

from typing import Literal

import torch

ModelDtype = Literal["auto", "float32", "bfloat16", "float16"]
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def model_dtype(asked: ModelDtype, own: object, device_type: str) -> torch.dtype:
    """The dtype of weights, activations and, unless it has one of its own, of the KV cache.

    Args:
        asked: by the settings. "auto" is float32 on a CPU, which every CPU computes at full speed; on a GPU the model's own if
            that has 16 bits, else bfloat16.
        own: dtype of the model's config: its name, as in config.json, or what transformers made of it; None: it has none.
        device_type: "cpu" or "cuda".
    """
    if asked != "auto":
        return _BY_NAME[asked]
    if device_type == "cpu":
        return torch.float32
    found = _BY_NAME.get(str(own).removeprefix("torch."))
    return found if found in SIXTEEN_BITS else torch.bfloat16
