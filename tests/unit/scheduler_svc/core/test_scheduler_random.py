"""Whatever happens in whatever order: outputs are right, KV is never mixed up, and all blocks come back."""

import random
from collections.abc import Callable

from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import QueueFull
from scheduler_svc.core.policies.fair_share import FairShare
from scheduler_svc.core.policies.fcfs import Fcfs
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.policies.strict_priority import StrictPriority
from scheduler_svc.core.request import FinishReason, ServiceClass
from scheduler_svc.core.scheduler import SchedulerConfig
from scheduler_svc.core.step_time import StepWork
from tests.unit.scheduler_svc.core.rig import OTHER_ROOT, ROOT, Rig, make_config

RATES = {
    "schedule": 30,
    "apply": 30,
    "add": 9,
    "cancel": 1.5,
    "finish": 1.5,
    "fail": 0.7,
    "begin_load": 6,
    "end_load": 4,
    "take_saves": 5,
    "end_save": 5,
    "flush": 0.5,
    "reset": 0.05,
    "evacuate": 0.05,
    "expire": 0.5,
}


class RandomBudget:
    """Any number of prompt tokens beside decodes, at least one."""

    def __init__(self, rng: random.Random):
        self._rng = rng

    def num_tokens(self, decodes: StepWork, num_waiting_tokens: int) -> int:
        return self._rng.choice([1, 3, 8, 100])

    def num_tokens_within(self, step_s: float, work: StepWork, begin: int, num_tokens: int) -> int:
        least = 0 if work.num_prefill_tokens else 1
        return self._rng.randint(least, num_tokens)

    def num_tokens_if_short(self, times_empty: float, work: StepWork, begin: int, num_tokens: int) -> int:
        return self.num_tokens_within(0.01, work, begin, num_tokens)


class RandomDriver:
    """Does one random thing to a rig after another. All randomness comes from rng."""

    def __init__(self, config: SchedulerConfig, rng: random.Random, run_ahead: int, policy: Policy | None = None):
        self.rig = Rig(config, RandomBudget(rng), policy)
        self.rng = rng
        self.run_ahead = run_ahead
        size = config.block_size
        self.prefixes = [[rng.randrange(50) for _ in range(size * rng.randint(1, 4))] for _ in range(4)]
        self.names = list(RATES)
        self.weights = list(RATES.values())

    def step(self) -> None:
        getattr(self, self.rng.choices(self.names, self.weights)[0])()
        self.rig.now_s += 1
        self.rig.scheduler.check_integrity()

    def add(self) -> None:
        rng, rig = self.rng, self.rig
        prompt = list(rng.choice(self.prefixes)) if rng.random() < 0.8 else []
        prompt += [rng.randrange(50) for _ in range(rng.choice([0, 0, 1, 2, 3, 7, 12]))]
        prompt = prompt[: rng.randint(1, 40)] or [1]
        room = rig.config.num_blocks * rig.config.block_size + 1 - len(prompt)
        try:
            rig.add(
                prompt,
                min(room, rng.choice([1, 2, 5, 9, 20])),
                n=rng.choice([1, 1, 1, 2, 4]),
                stop={rng.randrange(50) for _ in range(4)} if rng.random() < 0.5 else None,
                min_tokens=rng.choice([0, 0, 3]),
                root=ROOT if rng.random() < 0.9 else OTHER_ROOT,
                queue_deadline_s=rig.now_s + 40 if rng.random() < 0.2 else None,
                deadline_s=rig.now_s + 80 if rng.random() < 0.1 else None,
                tpot_target_s=1.0 if rng.random() < 0.1 else None,
                tenant=rng.choice("abc"),
                service_class=rng.choice(list(ServiceClass)),
                priority=rng.choice([0, 0, 0, 1, -1]),
            )
        except QueueFull as error:
            assert error.retry_after_s

    def schedule(self) -> None:
        if len(self.rig.plans) < 1 + self.run_ahead:
            self.rig.schedule()

    def apply(self) -> None:
        if self.rig.plans:
            self.rig.apply()

    def cancel(self) -> None:
        live = self.rig.live_requests()
        if live:
            self.rig.cancel(self.rng.choice(live))

    def finish(self) -> None:
        live = self.rig.live_sequences()
        if live:
            self.rig.finish(self.rng.choice(live))

    def fail(self) -> None:
        known = list(self.rig.executor.sequences)
        if known:
            self.rig.executor.failing.add(self.rng.choice(known))

    def begin_load(self) -> None:
        live = self.rig.live_requests()
        if live:
            self.rig.begin_load(self.rng.choice(live), self.rng.randint(0, 6), early=self.rng.random() < 0.5)

    def end_load(self) -> None:
        if self.rig.loads:
            self.rig.end_load(self.rng.randrange(len(self.rig.loads)))

    def take_saves(self) -> None:
        self.rig.take_saves(self.rng.randint(1, 8), early=self.rng.random() < 0.5)

    def end_save(self) -> None:
        if self.rig.saves:
            self.rig.end_save(self.rng.randrange(len(self.rig.saves)))

    def flush(self) -> None:
        self.rig.scheduler.flush_cache()

    def reset(self) -> None:
        self.rig.reset()

    def evacuate(self) -> None:
        self.rig.evacuate()

    def expire(self) -> None:
        self.rig.take(self.rig.scheduler.expire(self.rig.now_s))


def test_all_blocks_are_back_after_100_000_random_operations() -> None:
    config = make_config(
        num_blocks=19, max_num_seqs=6, max_num_batched_tokens=24, max_chunk_tokens=9, max_waiting_requests=12, save_blocks=True
    )
    rng = random.Random(1)
    driver = RandomDriver(config, rng, run_ahead=0)

    for i in range(100_000):
        if i % 1000 == 0:
            driver.run_ahead = rng.randint(0, 2)
        driver.step()
    driver.rig.executor.failing.clear()
    driver.rig.wind_up()

    assert set(driver.rig.ended.values()) == set(FinishReason), "an ending that never happened was not tested"
    stats = driver.rig.scheduler.stats()
    assert stats.num_preemptions > 100
    assert stats.num_discarded_tokens > 100
    assert set(stats.cached_tokens_by_tier) == {"device", "shm"}


@example(  # single tokens of prompts, counted as decodes, beside a preferred number of prompt tokens
    seed=55, num_blocks=11, block_size=1, max_num_seqs=7, max_num_batched_tokens=7, max_chunk_tokens=5, run_ahead=0,
    prefix_caching=False, policy=Fcfs,
)  # fmt: skip
@given(
    policy=st.sampled_from([Fcfs, FairShare, StrictPriority]),
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(11, 60),
    block_size=st.sampled_from([1, 3, 4, 16]),
    max_num_seqs=st.integers(1, 9),
    max_num_batched_tokens=st.sampled_from([1, 2, 7, 64]),
    max_chunk_tokens=st.sampled_from([1, 5, 64]),
    run_ahead=st.integers(0, 2),
    prefix_caching=st.booleans(),
)
@settings(max_examples=60)
def test_scheduler_gives_right_outputs_under_any_limits(
    seed: int,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_chunk_tokens: int,
    run_ahead: int,
    prefix_caching: bool,
    policy: Callable[[], Policy],
) -> None:
    config = make_config(
        num_blocks=max(num_blocks, -(-60 // block_size)),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_chunk_tokens=max_chunk_tokens,
        prefix_caching=prefix_caching,
        save_blocks=True,
    )
    driver = RandomDriver(config, random.Random(seed), run_ahead, policy())
    for _ in range(250):
        driver.step()
    driver.rig.executor.failing.clear()
    driver.rig.wind_up(run_ahead)
