"""Sequences that share a prompt, on a GPU in float32: the same tokens with and without reading it once."""

import random
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from common.ids import BlockId, SeqId
from executor_svc.core.plan import Chunk, NewSequence, StepPlan
from executor_svc.core.sampling import SamplingParams
from executor_svc.cuda.runner import CudaRunner
from executor_svc.engine import Engine, build_engine
from executor_svc.settings import ExecutorSettings
from tests.unit.executor_svc.model.tiny import config_of, save_config

NUM_SEQS, NUM_SHARED, NUM_OWN, NUM_STEPS, BLOCK = 40, 784, 9, 24, 16
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
        "num_blocks": 512,
        "max_num_seqs": 48,
        "max_num_batched_tokens": 1024,
        "max_model_len": 1024,
    }
    return build_engine(ExecutorSettings.model_validate({**values, **changes}), folder, print)


def tokens_of(engine: Engine) -> list[list[int]]:
    """Greedy tokens of sequences that share their first blocks; one computes them, the others come a step later."""
    assert isinstance(engine.runner, CudaRunner)
    engine.runner.reset()
    rng = random.Random(3)
    shared = [rng.randrange(3, 128) for _ in range(NUM_SHARED)]
    shared_blocks = [BlockId(1 + i) for i in range(NUM_SHARED // BLOCK)]
    own_blocks = -(-(NUM_OWN + NUM_STEPS) // BLOCK)
    news = []
    for number in range(NUM_SEQS):
        own = [BlockId(100 + own_blocks * number + i) for i in range(own_blocks)]
        prompt = [*shared, *(rng.randrange(3, 128) for _ in range(NUM_OWN))]
        computed = NUM_SHARED if number else 0
        sampling = SamplingParams(temperature=0.0)
        news.append(NewSequence(SeqId(number), prompt, len(prompt), computed, [*shared_blocks, *own], sampling))
    found: list[list[int]] = [[] for _ in news]
    plans = [
        StepPlan(1, new_sequences=news[:1], chunks=[Chunk(SeqId(0), NUM_SHARED + NUM_OWN)]),
        StepPlan(2, new_sequences=news[1:], chunks=[Chunk(SeqId(i), NUM_OWN) for i in range(1, NUM_SEQS)]),
        *(StepPlan(3 + step, chunks=[Chunk(SeqId(i), 1) for i in range(NUM_SEQS)]) for step in range(NUM_STEPS)),
    ]
    for plan in plans:
        outcome = engine.runner.execute(plan)
        assert not outcome.failures, outcome.failures
        for sampled in outcome.sampled:
            found[sampled.seq_id].append(sampled.token_id)
    return found


@pytest.mark.parametrize("family", list(CONFIGS))
def test_greedy_tokens_do_not_depend_on_sharing(family: str, tmp_path: Path) -> None:
    folder = save_config(CONFIGS[family](), tmp_path / family)
    expected = tokens_of(make_engine(folder, cuda_graphs=False, backend="torch"))
    engine = make_engine(folder)
    runner = engine.runner
    assert isinstance(runner, CudaRunner) and runner.graphs is not None

    assert tokens_of(engine) == expected
    groups = runner.prefixes.latest
    assert groups is not None and groups.lens.tolist() == [768] and len(groups.members) == NUM_SEQS
    runner.graphs = None
    assert tokens_of(engine) == expected, "without graphs"
