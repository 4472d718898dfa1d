"""Sequences that share a prompt, on a GPU in float32: the same tokens with and without reading it once."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from executor_svc.cuda.runner import CudaRunner
from executor_svc.engine import Engine, build_engine
from executor_svc.runner import Sampled
from executor_svc.settings import ExecutorSettings
from tests.unit.executor_svc.cuda.shared_prompt import NUM_SEQS, SETTINGS, sampled_of, tokens_of
from tests.unit.executor_svc.model.tiny import config_of, save_config

NUM_STEPS = 24
TOLERANCE = 1e-3
"""Of a log probability: float32 sums in another order, through all layers."""
MAX_TIES = 5
"""Of 1,800 tokens."""
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


def check(found: list[list[Sampled]], wanted: list[list[Sampled]]) -> None:
    """The same tokens and log probabilities, up to the first near tie of a sequence: there it may go another way."""
    num_ties = 0
    for ours, theirs in zip(found, wanted, strict=True):
        assert len(ours) == len(theirs) == NUM_STEPS + 1
        for our, their in zip(ours, theirs, strict=True):
            assert our.logprobs is not None and their.logprobs is not None
            best, second = (entry.logprob for entry in their.logprobs.top)
            assert our.logprobs.chosen.logprob == pytest.approx(their.logprobs.chosen.logprob, abs=TOLERANCE)
            if our.token_id != their.token_id:
                assert best - second < 2 * TOLERANCE, "another token where there is no tie"
                num_ties += 1
                break
    assert num_ties <= MAX_TIES


@pytest.mark.parametrize("family", list(CONFIGS))
def test_tokens_and_their_probabilities_do_not_depend_on_sharing(family: str, tmp_path: Path) -> None:
    folder = save_config(CONFIGS[family](), tmp_path / family)
    expected = sampled_of(make_engine(folder, cuda_graphs=False, backend="torch"), NUM_STEPS, 2)
    engine = make_engine(folder)
    runner = engine.runner
    assert isinstance(runner, CudaRunner) and runner.graphs is not None

    check(sampled_of(engine, NUM_STEPS, 2), expected)
    groups = runner.prefixes.latest
    assert groups is not None and groups.lens.tolist() == [768] and len(groups.members) == NUM_SEQS
    assert tokens_of(engine, NUM_STEPS) == [[one.token_id for one in sequence] for sequence in sampled_of(engine, NUM_STEPS, 2)]
    runner.graphs = None
    check(sampled_of(engine, NUM_STEPS, 2), expected)
