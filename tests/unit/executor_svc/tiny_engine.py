"""A tiny random Llama as a folder and as an engine, for tests that need a real model and no quality."""

import json
from pathlib import Path

from executor_svc.engine import Engine, build_engine
from executor_svc.settings import ExecutorSettings

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "initializer_range": 0.5,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def make_model_folder(folder: Path) -> Path:
    """A folder that --load-format random can serve."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def make_settings(folder: Path, **changes: object) -> ExecutorSettings:
    """Settings of a small executor of the folder's model."""
    values: dict[str, object] = {
        "model": str(folder),
        "load_format": "random",
        "backend": "torch",
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "num_threads": 1,
    }
    return ExecutorSettings.model_validate({**values, **changes})


def make_engine(folder: Path, **changes: object) -> Engine:
    """An engine of the tiny model in this process."""
    return build_engine(make_settings(make_model_folder(folder), **changes), folder, lambda text: None)
