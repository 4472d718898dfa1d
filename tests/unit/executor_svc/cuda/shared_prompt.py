"""Sequences that share a prompt, as steps of a runner: one computes it, the others come when it is there."""

import random

from common.ids import BlockId, SeqId
from executor_svc.core.plan import Chunk, NewSequence, StepPlan
from executor_svc.core.sampling import SamplingParams
from executor_svc.cuda.runner import CudaRunner
from executor_svc.engine import Engine
from executor_svc.runner import Sampled

NUM_SEQS, NUM_SHARED, NUM_OWN, BLOCK = 72, 784, 9, 16
SETTINGS = {"num_blocks": 512, "max_num_seqs": 80, "max_num_batched_tokens": 1024, "max_model_len": 1024}
"""Of an executor that such steps fit into."""


def tokens_of(engine: Engine, num_steps: int) -> list[list[int]]:
    """Greedy tokens of each sequence: one of its prompt, and num_steps more."""
    return [[sampled.token_id for sampled in sequence] for sequence in sampled_of(engine, num_steps)]


def sampled_of(engine: Engine, num_steps: int, num_logprobs: int | None = None) -> list[list[Sampled]]:
    """As tokens_of, with log probabilities of the num_logprobs best tokens if asked for."""
    assert isinstance(engine.runner, CudaRunner)
    engine.runner.reset()
    rng = random.Random(3)
    shared = [rng.randrange(3, 128) for _ in range(NUM_SHARED)]
    shared_blocks = [BlockId(1 + i) for i in range(NUM_SHARED // BLOCK)]
    own_blocks = -(-(NUM_OWN + num_steps) // BLOCK)
    news = []
    for number in range(NUM_SEQS):
        own = [BlockId(100 + own_blocks * number + i) for i in range(own_blocks)]
        prompt = [*shared, *(rng.randrange(3, 128) for _ in range(NUM_OWN))]
        computed = NUM_SHARED if number else 0
        sampling = SamplingParams(temperature=0.0, num_logprobs=num_logprobs)
        news.append(NewSequence(SeqId(number), prompt, len(prompt), computed, [*shared_blocks, *own], sampling))
    found: list[list[Sampled]] = [[] for _ in news]
    plans = [
        StepPlan(1, new_sequences=news[:1], chunks=[Chunk(SeqId(0), NUM_SHARED + NUM_OWN)]),
        StepPlan(2, new_sequences=news[1:], chunks=[Chunk(SeqId(i), NUM_OWN) for i in range(1, NUM_SEQS)]),
        *(StepPlan(3 + step, chunks=[Chunk(SeqId(i), 1) for i in range(NUM_SEQS)]) for step in range(num_steps)),
    ]
    for plan in plans:
        outcome = engine.runner.execute(plan)
        assert not outcome.failures, outcome.failures
        for sampled in outcome.sampled:
            found[sampled.seq_id].append(sampled)
    return found
