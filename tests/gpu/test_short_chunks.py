"""The rest of a long prompt on a GPU in float32: as a group of decodes it gives what it gives as part of the whole prompt."""

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
from executor_svc.engine import Engine
from executor_svc.runner import Sampled
from tests.gpu.test_shared_prefix import NUM_STEPS, check, make_engine
from tests.unit.executor_svc.model.tiny import config_of, save_config

NUM_TOKENS, BLOCK = 4200, 16
SETTINGS = {"num_blocks": 400, "max_num_seqs": 80, "max_num_batched_tokens": 4352, "max_model_len": 4352}


def sampled_of(engine: Engine, lengths: list[int]) -> list[list[Sampled]]:
    """What the prompt gives in chunks of these lengths, and NUM_STEPS decodes."""
    assert isinstance(engine.runner, CudaRunner)
    engine.runner.reset()
    rng = random.Random(5)
    prompt = [rng.randrange(3, 128) for _ in range(NUM_TOKENS)]
    blocks = [BlockId(i) for i in range(-(-(NUM_TOKENS + NUM_STEPS) // BLOCK))]
    new = NewSequence(SeqId(1), prompt, NUM_TOKENS, 0, blocks, SamplingParams(temperature=0.0, num_logprobs=2))
    found: list[Sampled] = []
    for step, length in enumerate([*lengths, *[1] * NUM_STEPS], 1):
        plan = StepPlan(step, new_sequences=[new] if step == 1 else [], chunks=[Chunk(SeqId(1), length)])
        outcome = engine.runner.execute(plan)
        assert not outcome.failures, outcome.failures
        found += outcome.sampled
    return [found]


@pytest.mark.parametrize("rest", [2, 16, 32])
def test_the_rest_of_a_prompt_gives_what_the_whole_gives(rest: int, tmp_path: Path) -> None:
    folder = save_config(config_of("LlamaConfig", max_position_embeddings=4352), tmp_path / "llama")
    engine = make_engine(folder, **SETTINGS)
    expected = sampled_of(engine, [NUM_TOKENS])

    check(sampled_of(engine, [NUM_TOKENS - rest, rest]), expected)
    assert isinstance(engine.runner, CudaRunner)
    engine.runner.graphs = None
    check(sampled_of(engine, [NUM_TOKENS - rest, rest]), expected)
