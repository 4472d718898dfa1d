"""One step over a tiny real model: the same tokens however they are batched, and failures that stay with their sequence."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.errors import InvalidParameter
from common.ids import BlockId, SeqId
from executor_svc.core.plan import Chunk, NewSequence, StepPlan
from executor_svc.core.sampling import SamplingParams
from executor_svc.cuda.runner import CudaRunner
from executor_svc.engine import Engine
from executor_svc.kvcache.pool import KvPool
from executor_svc.model.forward_context import ForwardContext
from executor_svc.model.load import LoadedModel
from executor_svc.runner import ModelRunner, StepOutcome, StepRunner
from tests.unit.executor_svc.cuda.host_queue import HostQueue, queued
from tests.unit.executor_svc.tiny_engine import make_engine

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], [30] * 13, [99]]


@pytest.fixture(scope="module", params=["torch", "cpu", "queued"])
def shared_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The last one is the GPU's runner over a queue on the CPU."""
    folder = tmp_path_factory.mktemp("model")
    if request.param == "queued":
        return queued(make_engine(folder), HostQueue())
    return make_engine(folder, backend=request.param)


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    shared_engine.runner.reset()
    assert isinstance(shared_engine.pool, KvPool)
    shared_engine.pool.zero()
    return shared_engine


def make_new(
    seq_id: int, token_ids: Sequence[int], block_ids: Sequence[int], *, num_computed: int = 0, sampling: SamplingParams = GREEDY
) -> NewSequence[SamplingParams]:
    return NewSequence(SeqId(seq_id), token_ids, len(token_ids), num_computed, [BlockId(i) for i in block_ids], sampling)


def make_chunk(seq_id: int, num_tokens: int, new_block_ids: Sequence[int] = ()) -> Chunk:
    return Chunk(SeqId(seq_id), num_tokens, [BlockId(i) for i in new_block_ids])


def tokens_of(outcome: StepOutcome) -> dict[int, int]:
    assert not outcome.failures
    return {sampled.seq_id: sampled.token_id for sampled in outcome.sampled}


def generate_alone(runner: StepRunner, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens of one prompt, whole prompt first; blocks 40 and up."""
    runner.reset()
    blocks = list(range(40, 48))
    outcome = runner.execute(StepPlan(1, new_sequences=[make_new(1, prompt, blocks)], chunks=[make_chunk(1, len(prompt))]))
    tokens = [outcome.sampled[0].token_id]
    for step in range(2, num_tokens + 1):
        tokens.append(tokens_of(runner.execute(StepPlan(step, chunks=[make_chunk(1, 1)])))[1])
    runner.reset()
    return tokens


def test_packed_sequences_get_the_tokens_they_get_alone(engine: Engine) -> None:
    expected = [generate_alone(engine.runner, prompt, 5) for prompt in PROMPTS]
    news = [make_new(i, prompt, range(5 * i, 5 * i + 5)) for i, prompt in enumerate(PROMPTS)]
    chunks = [make_chunk(i, len(prompt)) for i, prompt in enumerate(PROMPTS)]
    outcomes = [engine.runner.execute(StepPlan(1, new_sequences=news, chunks=chunks))]
    for step in range(2, 6):
        outcomes.append(engine.runner.execute(StepPlan(step, chunks=[make_chunk(i, 1) for i in (2, 0, 3, 1)])))

    for i in range(len(PROMPTS)):
        assert [tokens_of(outcome)[i] for outcome in outcomes] == expected[i]
    assert [sampled.seq_id for sampled in outcomes[1].sampled] == [2, 0, 3, 1], "results are in the order of the plan's chunks"


@pytest.mark.parametrize("size", [1, 3, 5])
def test_chunks_of_a_prompt_give_the_tokens_of_the_whole(engine: Engine, size: int) -> None:
    prompt = PROMPTS[2]
    expected = generate_alone(engine.runner, prompt, 1)
    new = [make_new(1, prompt, range(4))]
    sampled: dict[int, int] = {}
    for step, start in enumerate(range(0, len(prompt), size), start=1):
        assert not sampled, "a chunk before the last sampled"
        chunk = make_chunk(1, min(size, len(prompt) - start))
        sampled = tokens_of(engine.runner.execute(StepPlan(step, new_sequences=new, chunks=[chunk])))
        new = []

    assert [sampled[1]] == expected


def test_a_mixed_step_changes_nobodys_tokens(engine: Engine) -> None:
    """Sequence 1 decodes while the prompt of sequence 2 comes in chunks."""
    expected = [generate_alone(engine.runner, prompt, 4) for prompt in PROMPTS[:2]]
    engine.runner.execute(StepPlan(1, new_sequences=[make_new(1, PROMPTS[0], range(4))], chunks=[make_chunk(1, 7)]))
    engine.runner.execute(StepPlan(2, new_sequences=[make_new(2, PROMPTS[1], [9])], chunks=[make_chunk(2, 2), make_chunk(1, 1)]))
    engine.runner.execute(StepPlan(3, chunks=[make_chunk(1, 1), make_chunk(2, 1)]))
    last = engine.runner.execute(StepPlan(4, chunks=[make_chunk(1, 1), make_chunk(2, 1, [10])]))

    assert tokens_of(last) == {1: expected[0][3], 2: expected[1][1]}


def test_shared_prefix_blocks_are_attended_to(engine: Engine) -> None:
    """A second sequence starts behind the blocks that the first has computed."""
    prompt = PROMPTS[2]
    expected = generate_alone(engine.runner, prompt, 1)
    engine.runner.execute(StepPlan(1, new_sequences=[make_new(1, prompt, range(4))], chunks=[make_chunk(1, 13)]))
    new = make_new(2, prompt, [0, 1, 2, 9], num_computed=12)

    outcome = engine.runner.execute(StepPlan(2, new_sequences=[new], chunks=[make_chunk(2, 1)]))

    assert tokens_of(outcome) == {2: expected[0]}


def test_a_copied_block_is_attended_to(engine: Engine) -> None:
    """Copy on write: the fork decodes on a copy of the last block, in the very plan that copies it."""
    prompt = PROMPTS[0]
    expected = generate_alone(engine.runner, prompt, 2)
    first = engine.runner.execute(StepPlan(1, new_sequences=[make_new(1, prompt, [0, 1])], chunks=[make_chunk(1, 7)]))
    token = tokens_of(first)[1]
    plan = StepPlan(
        2,
        dropped_seq_ids=[SeqId(1)],
        new_sequences=[make_new(2, [*prompt, token], [0, 5], num_computed=7)],
        block_copies=[(BlockId(1), BlockId(5))],
        chunks=[make_chunk(2, 1)],
    )

    assert tokens_of(engine.runner.execute(plan)) == {2: expected[1]}


def test_blocks_of_a_dropped_sequence_serve_another_in_the_same_plan(engine: Engine) -> None:
    expected = generate_alone(engine.runner, PROMPTS[1], 1)
    engine.runner.execute(StepPlan(1, new_sequences=[make_new(1, PROMPTS[0], [0, 1])], chunks=[make_chunk(1, 7)]))

    plan = StepPlan(2, [SeqId(1)], [make_new(2, PROMPTS[1], [0])], chunks=[make_chunk(2, 3)])

    assert tokens_of(engine.runner.execute(plan)) == {2: expected[0]}


def test_a_step_without_samples_returns_none(engine: Engine) -> None:
    outcome = engine.runner.execute(StepPlan(1, new_sequences=[make_new(1, PROMPTS[0], [0, 1])], chunks=[make_chunk(1, 3)]))

    assert tokens_of(outcome) == {}
    assert outcome.num_tokens == 3


def test_a_plan_of_drops_only_runs_no_model(engine: Engine) -> None:
    engine.runner.execute(StepPlan(1, new_sequences=[make_new(1, PROMPTS[0], [0, 1])]))

    outcome = engine.runner.execute(StepPlan(2, dropped_seq_ids=[SeqId(1)]))

    assert (outcome.num_tokens, list(outcome.sampled), list(outcome.failures)) == (0, [], [])


def test_logprobs_come_with_the_token(engine: Engine) -> None:
    sampling = replace(GREEDY, num_logprobs=2)
    plan = StepPlan(1, new_sequences=[make_new(1, PROMPTS[0], [0, 1], sampling=sampling)], chunks=[make_chunk(1, 7)])

    (sampled,) = engine.runner.execute(plan).sampled

    assert sampled.logprobs is not None
    assert sampled.logprobs.chosen.token_id == sampled.token_id
    assert sampled.logprobs.top[0].token_id == sampled.token_id


def test_a_seeded_sequence_draws_the_same_whatever_runs_beside_it(engine: Engine) -> None:
    sampling = SamplingParams(temperature=1.0, seed=17)
    alone = StepPlan(1, new_sequences=[make_new(1, PROMPTS[0], [0, 1], sampling=sampling)], chunks=[make_chunk(1, 7)])
    expected = tokens_of(engine.runner.execute(alone))[1]
    engine.runner.reset()
    news = [make_new(9, PROMPTS[1], [5]), make_new(1, PROMPTS[0], [0, 1], sampling=sampling)]

    outcome = engine.runner.execute(StepPlan(1, new_sequences=news, chunks=[make_chunk(9, 3), make_chunk(1, 7)]))

    assert tokens_of(outcome)[1] == expected


class PoisonedModel:
    """Raises, or returns NaN, whenever a token of the poison is in the batch."""

    def __init__(self, model: LoadedModel, poison: int, *, raises: bool):
        self._model = model
        self._poison = poison
        self._raises = raises

    def compute_logits(self, context: ForwardContext, input_ids: Tensor, position_ids: Tensor, sample_indices: Tensor) -> Tensor:
        poisoned = input_ids == self._poison
        if self._raises and poisoned.any():
            raise RuntimeError("poison")
        logits = self._model.compute_logits(context, input_ids, position_ids, sample_indices)
        logits[poisoned[sample_indices]] = torch.nan
        return logits

    forward = compute_logits


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("is_queued", [True, False])
def test_a_poisoned_sequence_fails_alone(tmp_path: Path, raises: bool, is_queued: bool) -> None:
    """Whether the forward pass raises or computes no numbers: the others get their tokens in the same step, and go on."""
    engine = make_engine(tmp_path)
    if is_queued:
        engine = queued(engine, HostQueue())
    assert isinstance(engine.runner, ModelRunner | CudaRunner)
    assert isinstance(engine.runner.model, LoadedModel)
    expected = [generate_alone(engine.runner, prompt, 2) for prompt in PROMPTS[:2]]
    engine.runner.model = PoisonedModel(engine.runner.model, 99, raises=raises)
    news = [make_new(i, prompt, range(4 * i, 4 * i + 4)) for i, prompt in enumerate([PROMPTS[0], [98, 99], PROMPTS[1]])]

    first = engine.runner.execute(StepPlan(1, new_sequences=news, chunks=[make_chunk(0, 7), make_chunk(1, 2), make_chunk(2, 3)]))
    second = engine.runner.execute(StepPlan(2, chunks=[make_chunk(0, 1), make_chunk(1, 1), make_chunk(2, 1)]))

    assert [failure.seq_id for failure in first.failures] == [1]
    assert {sampled.seq_id: sampled.token_id for sampled in first.sampled} == {0: expected[0][0], 2: expected[1][0]}
    assert tokens_of(second) == {0: expected[0][1], 2: expected[1][1]}
    engine.runner.batch.check_integrity()


def test_a_plan_that_makes_no_sense_is_refused_and_the_session_could_go_on(engine: Engine) -> None:
    with pytest.raises(InvalidParameter, match=r"plan\.step_id"):
        engine.runner.execute(StepPlan(7))

    assert tokens_of(engine.runner.execute(StepPlan(1))) == {}
