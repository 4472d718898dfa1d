"""Sequences that share a prompt, on a GPU in float32: the same tokens with and without reading it once."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from executor_svc.cuda.runner import CudaRunner
from executor_svc.engine import Engine, build_engine
from executor_svc.settings import ExecutorSettings
from tests.unit.executor_svc.cuda.shared_prompt import NUM_SEQS, SETTINGS, tokens_of
from tests.unit.executor_svc.model.tiny import config_of, save_config

NUM_STEPS = 24
CONFIGS = {
    "llama": lambda: config_of("LlamaConfig", max_position_embeddings=1024),
    "gemma3": lambda: config_of(
        "Gemma3TextConfig", head_dim=16, sliding_window=19, query_pre_attn_scalar=20, max_position_embeddings=1024
    ),
}


def make_engine(folder: Path, **changes: object) -> Engine:
    values: dict[str, object] = {
        "model": str(folder),
        "device": "cuda",
        "dtype": "float32",
        "load_format": "random",
        **SETTINGS,
    }
    return build_engine(ExecutorSettings.model_validate({**values, **changes}), folder, print)


@pytest.mark.parametrize("family", list(CONFIGS))
def test_greedy_tokens_do_not_depend_on_sharing(family: str, tmp_path: Path) -> None:
    folder = save_config(CONFIGS[family](), tmp_path / family)
    expected = tokens_of(make_engine(folder, cuda_graphs=False, backend="torch"), NUM_STEPS)
    engine = make_engine(folder)
    runner = engine.runner
    assert isinstance(runner, CudaRunner) and runner.graphs is not None

    assert tokens_of(engine, NUM_STEPS) == expected
    groups = runner.prefixes.latest
    assert groups is not None and groups.lens.tolist() == [768] and len(groups.members) == NUM_SEQS
    runner.graphs = None
    assert tokens_of(engine, NUM_STEPS) == expected, "without graphs"
