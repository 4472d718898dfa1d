"""The rest of a prompt whose blocks are there already, beside other work: tokens are those of a runner that divides nothing."""

from pathlib import Path

import pytest
import torch

from common.ids import BlockId, SeqId
from executor_svc.core.plan import Chunk, NewSequence, StepPlan
from executor_svc.core.sampling import SamplingParams
from executor_svc.cuda.runner import CudaRunner
from executor_svc.engine import Engine, build_engine
from executor_svc.kvcache.pool import KvPool
from executor_svc.settings import ExecutorSettings
from tests.unit.executor_svc.cuda.host_queue import HostQueue, queued
from tests.unit.executor_svc.cuda.test_shared_prefix import Witness
from tests.unit.executor_svc.model.tiny import config_of, save_config

NUM_THERE, BLOCK = 4112, 16
SETTINGS = {"num_blocks": 600, "max_num_seqs": 40, "max_num_batched_tokens": 256, "max_model_len": 4200}


def make_engine(folder: Path) -> Engine:
    values = {"model": str(folder), "backend": "torch", "load_format": "random", "dtype": "float32", "num_threads": 1}
    return build_engine(ExecutorSettings.model_validate({**values, **SETTINGS}), folder, lambda text: None)


def with_something_in_every_block(engine: Engine) -> Engine:
    assert isinstance(engine.pool, KvPool)
    generator = torch.Generator().manual_seed(3)
    for cache in engine.pool.layer_caches:
        for part in (cache.key, cache.value):
            part.normal_(generator=generator)
    return engine


def new(seq_id: int, num_there: int, num_tokens: int, first_block: int) -> NewSequence[SamplingParams]:
    prompt = [3 + (7 * i + seq_id) % 100 for i in range(num_there + num_tokens)]
    blocks = [BlockId(first_block + i) for i in range(-(-(len(prompt) + 4) // BLOCK))]
    return NewSequence(SeqId(seq_id), prompt, len(prompt), num_there, blocks, SamplingParams(temperature=0.0))


def plans() -> list[StepPlan[SamplingParams]]:
    """A short prompt; then the rests of two long ones, beside its decode and a new prompt; then decodes of all."""
    rests = [new(1, NUM_THERE, 16, 0), new(2, NUM_THERE - 3, 5, 290)]
    return [
        StepPlan(1, new_sequences=[new(0, 0, 9, 560)], chunks=[Chunk(SeqId(0), 9)]),
        StepPlan(
            2,
            new_sequences=[*rests, new(3, 0, 20, 570)],
            chunks=[Chunk(SeqId(1), 16), Chunk(SeqId(0), 1), Chunk(SeqId(3), 20), Chunk(SeqId(2), 5)],
        ),
        *(StepPlan(step, chunks=[Chunk(SeqId(i), 1) for i in range(4)]) for step in (3, 4)),
    ]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_the_rest_of_a_long_prompt_gives_the_same_tokens(graphs: bool, tmp_path: Path) -> None:
    folder = save_config(config_of("LlamaConfig", max_position_embeddings=4200), tmp_path / "llama")
    plain = with_something_in_every_block(make_engine(folder))
    expected = [plain.runner.execute(plan).sampled for plan in plans()]
    witness = Witness()
    engine = queued(make_engine(folder), HostQueue(), graphs=graphs, backend=witness)
    with_something_in_every_block(engine)
    assert isinstance(engine.runner, CudaRunner)
    witness.seen.clear()

    found = [engine.runner.execute(plan).sampled for plan in plans()]

    assert found == expected
    assert [len(sampled) for sampled in found] == [1, 4, 4, 4]
    assert {tuple(groups) for groups in witness.seen} == {((4096, 16), (4096, 5))}
    engine.runner.batch.check_integrity()
    engine.runner.close()
