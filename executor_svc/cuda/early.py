"""What a GPU can do while Python still imports transformers: wake up, and plan the library's attention.

Both take seconds in which nothing is interpreted. They need no model, only its heads, which config.json tells for most families;
for the others all of it is done later, as if this file were not there. Plans are of the thread that makes them: call this from
the one that will run steps.
"""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from executor_svc.model.dtype import SIXTEEN_BITS, model_dtype
from executor_svc.settings import ExecutorSettings

log = logging.getLogger(__name__)


def early_work(settings: ExecutorSettings, folder: Path) -> Callable[[], None]:
    """What to do for the model in folder meanwhile: nothing, unless it is to run on a GPU with this package's kernels.

    All that it imports is imported now: two threads that import the same modules would wait for each other.
    """
    if settings.device == "cpu" or settings.backend not in ("auto", "triton") or not torch.cuda.is_available():
        return _nothing
    from executor_svc.kernels.triton.library import allow_library, plan_ahead  # Triton is not there on every machine

    config = json.loads((folder / "config.json").read_text())
    heads = heads_of(config)
    dtype = model_dtype(settings.dtype, config.get("dtype", config.get("torch_dtype")), "cuda")
    if heads is None or dtype not in SIXTEEN_BITS:  # the library has attention of 16 bits
        return _nothing

    def plan() -> None:
        allow_library()
        try:
            plan_ahead(torch.device("cuda", torch.cuda.current_device()), dtype, *heads)
        except RuntimeError as error:  # a device that is full or broken: whoever needs it next says so in the right place
            log.info("attention is planned later: %s", error)

    return plan


def _nothing() -> None:
    pass


def heads_of(config: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """num_heads, num_kv_heads, head_dim of a config.json; None: it does not say them in the usual way."""
    num_heads = config.get("num_attention_heads")
    if not isinstance(num_heads, int) or num_heads < 1:
        return None
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // num_heads
    return (num_heads, num_kv_heads, head_dim) if head_dim else None
