"""Steps that are queued before the results of earlier ones are read: the tokens are those of one step after the other."""

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from common.ids import BlockId, SeqId
from executor_svc.core.plan import Chunk, NewSequence, StepPlan
from executor_svc.core.sampling import SamplingParams
from executor_svc.cuda.runner import CudaRunner
from executor_svc.engine import Engine
from executor_svc.kvcache.pool import KvPool
from executor_svc.runner import StepOutcome, StepRunner
from tests.unit.executor_svc.cuda.host_queue import HostQueue, queued
from tests.unit.executor_svc.tiny_engine import make_engine

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = {0: [5, 6, 7, 8, 9, 10, 11], 1: [20, 21, 22], 2: [30] * 13, 3: [99]}
SAMPLINGS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=1.3, seed=5),
    "filtered": SamplingParams(temperature=2.0, top_k=20, top_p=0.9, min_p=0.01, seed=9),
    "penalised": SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5),
    "biased": SamplingParams(
        temperature=0.0, logit_bias={3: 4.0, 7: -3.0}, min_tokens=3, suppressed_until_min_tokens=frozenset({2})
    ),
    "with log probabilities": SamplingParams(temperature=0.0, num_logprobs=3),
}


@dataclass
class Rig:
    """A runner one step after the other, and the queued one, over pools of their own."""

    sync: StepRunner
    runner: CudaRunner
    gate: HostQueue

    def run_ahead(self, plans: list[StepPlan[SamplingParams]]) -> list[StepOutcome]:
        """All plans submitted before the first result is there."""
        outcomes: queue.SimpleQueue[StepOutcome | Exception] = queue.SimpleQueue()
        self.gate.gate.clear()
        for plan in plans:
            self.runner.submit(plan, outcomes.put, arrived_at=time.monotonic())
        assert outcomes.empty()
        self.gate.gate.set()
        found = [outcomes.get(timeout=10) for _ in plans]
        assert not [outcome for outcome in found if isinstance(outcome, Exception)]
        return [outcome for outcome in found if isinstance(outcome, StepOutcome)]


@pytest.fixture(scope="module", params=["eager", "graphs"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine, HostQueue]:
    gate = HostQueue()
    folder = tmp_path_factory.mktemp("model")
    return make_engine(folder), queued(make_engine(folder), gate, graphs=request.param == "graphs"), gate


@pytest.fixture
def rig(engines: tuple[Engine, Engine, HostQueue]) -> Iterator[Rig]:
    sync, ahead, gate = engines
    assert isinstance(ahead.runner, CudaRunner)
    for engine in (sync, ahead):
        engine.runner.reset()
        assert isinstance(engine.pool, KvPool)
        engine.pool.zero()
    yield Rig(sync.runner, ahead.runner, gate)
    gate.gate.set()
    ahead.runner.reset()


def make_new(seq_id: int, sampling: SamplingParams) -> NewSequence[SamplingParams]:
    prompt = PROMPTS[seq_id]
    return NewSequence(SeqId(seq_id), prompt, len(prompt), 0, [BlockId(8 * seq_id + i) for i in range(8)], sampling)


def make_plans(samplings: list[SamplingParams], num_steps: int) -> list[StepPlan[SamplingParams]]:
    """Prompts first, one of them in two chunks beside decodes, then decodes."""
    news = [make_new(i, sampling) for i, sampling in enumerate(samplings)]
    first = [Chunk(SeqId(i), len(PROMPTS[i]) - (4 if i == 0 else 0)) for i in range(len(samplings))]
    second = [Chunk(SeqId(i), 4 if i == 0 else 1) for i in range(len(samplings))]
    plans = [StepPlan(1, new_sequences=news, chunks=first), StepPlan(2, chunks=second)]
    for step in range(3, num_steps + 1):
        plans.append(StepPlan(step, chunks=[Chunk(SeqId(i), 1) for i in range(len(samplings))]))
    return plans


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_run_ahead_gives_the_tokens_of_one_step_after_the_other(rig: Rig, name: str) -> None:
    """Penalties depend on tokens that only the device knows, so such steps wait for them, one by one."""
    plans = make_plans([replace(SAMPLINGS[name], seed=i) for i in range(4)], 7)
    expected = [rig.sync.execute(plan) for plan in plans]
    must_wait = SAMPLINGS[name].has_penalties
    found = [rig.runner.execute(plan) for plan in plans] if must_wait else rig.run_ahead(plans)

    assert [outcome.sampled for outcome in found] == [outcome.sampled for outcome in expected]
    assert [outcome.failures for outcome in found] == [[] for _ in plans]
    assert [outcome.num_tokens for outcome in found] == [outcome.num_tokens for outcome in expected]
    rig.runner.batch.check_integrity()


def test_rows_of_all_kinds_share_a_step(rig: Rig) -> None:
    samplings = [SAMPLINGS[name] for name in ("greedy", "filtered", "with log probabilities", "biased")]
    plans = make_plans(samplings, 6)
    expected = [rig.sync.execute(plan) for plan in plans]

    assert [outcome.sampled for outcome in rig.run_ahead(plans)] == [outcome.sampled for outcome in expected]


def test_a_row_that_is_handed_on_ahead_of_results_keeps_nothing_of_its_last_sequence(rig: Rig) -> None:
    """Sequence 1 is dropped while its tokens are on their way; sequence 3 takes its row."""
    plans = make_plans([GREEDY, GREEDY], 4)
    plans.append(StepPlan(5, [SeqId(1)], [make_new(3, GREEDY)], chunks=[Chunk(SeqId(3), 1), Chunk(SeqId(0), 1)]))
    plans.append(StepPlan(6, chunks=[Chunk(SeqId(3), 1), Chunk(SeqId(0), 1)]))
    expected = [rig.sync.execute(plan) for plan in plans]

    assert [outcome.sampled for outcome in rig.run_ahead(plans)] == [outcome.sampled for outcome in expected]
    rig.runner.batch.check_integrity()


def test_a_preempted_sequence_comes_back_with_what_the_scheduler_knows(rig: Rig) -> None:
    """It is dropped and computed again from the prompt and the tokens whose results came, under its old id."""
    plans = make_plans([GREEDY, GREEDY], 5)
    expected = [rig.sync.execute(plan) for plan in plans]
    first = rig.run_ahead(plans[:3])
    tokens = [outcome.sampled[-1].token_id for outcome in first]
    known = [*PROMPTS[1], *tokens[:2]]
    again = NewSequence(SeqId(1), known, len(PROMPTS[1]), 0, [BlockId(40), BlockId(41), BlockId(42)], GREEDY)
    back = [
        StepPlan(4, [SeqId(1)], chunks=[Chunk(SeqId(0), 1)]),
        StepPlan(5, new_sequences=[again], chunks=[Chunk(SeqId(1), len(known)), Chunk(SeqId(0), 1)]),
    ]

    found = rig.run_ahead(back)

    assert found[1].sampled[0].token_id == expected[2].sampled[1].token_id
    assert found[1].sampled[1] == expected[4].sampled[0]


def test_what_a_failed_sequence_makes_ahead_does_not_count(rig: Rig) -> None:
    """Every token of sequence 1 is ruled out: it fails in its first step, and is silent in those queued after it."""
    nothing = replace(GREEDY, min_tokens=5, suppressed_until_min_tokens=frozenset(range(128)))
    plans = make_plans([GREEDY, nothing], 4)

    outcomes = rig.run_ahead(plans)

    assert [[failure.seq_id for failure in outcome.failures] for outcome in outcomes] == [[1], [], [], []]
    assert [[sampled.seq_id for sampled in outcome.sampled] for outcome in outcomes] == [[], [0], [0], [0]]
    last = rig.run_ahead([StepPlan(5, chunks=[Chunk(SeqId(0), 1), Chunk(SeqId(1), 1)]), StepPlan(6, [SeqId(1)])])
    assert [sampled.seq_id for sampled in last[0].sampled] == [0]
    assert not last[0].failures and not last[1].failures
    rig.runner.batch.check_integrity()


def test_a_reset_waits_for_results_that_are_on_their_way(rig: Rig) -> None:
    outcomes: list[object] = []
    for plan in make_plans([GREEDY], 3):
        rig.runner.submit(plan, outcomes.append, arrived_at=time.monotonic())
    rig.runner.reset()

    assert len(outcomes) == 3
    assert len(rig.runner.batch) == 0
