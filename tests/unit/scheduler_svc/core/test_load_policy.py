"""Loading is tried where it should pay, and never costs more than 5 %, whatever the tiers do."""

from dataclasses import dataclass
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.load_policy import LoadPolicy, Prompt
from scheduler_svc.core.prefill_time import PrefillTime
from scheduler_svc.core.step_time import StepTimeModel, StepWork
from scheduler_svc.core.tier_speed import TierSpeed

BLOCK_SIZE = 16
MAX_STEP_TOKENS = 512


@dataclass(frozen=True)
class Executor:
    """What computing really costs."""

    token_s: float = 1e-3
    attended_s: float = 0.0
    step_s: float = 1e-3

    def seconds(self, begin: int, end: int) -> float:
        return sum(self.step(_work(start, min(end, start + MAX_STEP_TOKENS))) for start in range(begin, end, MAX_STEP_TOKENS))

    def step(self, work: StepWork) -> float:
        return self.step_s + self.token_s * work.num_prefill_tokens + self.attended_s * work.num_attended


@dataclass(frozen=True)
class Tier:
    """How a tier really is: it may stop for ever after some blocks."""

    first_s: float
    block_s: float
    num_until_collapse: float = inf


def _work(begin: int, end: int) -> StepWork:
    num_tokens = end - begin
    return StepWork(num_tokens, num_tokens * begin + num_tokens * (num_tokens + 1) // 2)


def learned(executor: Executor, noise: float = 0.0) -> PrefillTime:
    """An executor's step times after sixty steps."""
    model = StepTimeModel()
    for number in range(60):
        begin, num_tokens = (number * 331) % 4000, 33 + (number * 97) % (MAX_STEP_TOKENS - 32)
        work = _work(begin, begin + num_tokens)
        model.learn(work, executor.step(work) * (1 + noise * (-1) ** number))
    prefill = PrefillTime(model, MAX_STEP_TOKENS)
    prefill.note_prefill()
    return prefill


def time_to_first_token(policy: LoadPolicy, prompt: Prompt, executor: Executor, tiers: dict[str, Tier]) -> float:
    """Decides, loads block by block until the patience is over, and computes the rest."""
    decision = policy.decide(prompt)
    now_s, num_loaded, previous = 0.0, 0, ""
    num_by_tier: dict[str, int] = {}
    for name in prompt.tiers[: decision.num_blocks]:
        tier = tiers[name]
        num_by_tier[name] = num_by_tier.get(name, 0) + 1
        comes_s = now_s + (tier.block_s if name == previous else tier.first_s)
        if num_by_tier[name] > tier.num_until_collapse:
            comes_s = inf
        deadline_s = decision.patience.seconds(num_loaded)
        if comes_s > deadline_s:
            now_s = max(now_s, deadline_s)
            break
        now_s, num_loaded, previous = comes_s, num_loaded + 1, name
    rest_s = executor.seconds(prompt.begin + num_loaded * BLOCK_SIZE, prompt.end)
    return prompt.spent_s + max(prompt.queue_s, now_s) + rest_s


seconds = st.floats(1e-5, 1.0)
a_tier = st.builds(Tier, seconds, seconds, st.one_of(st.just(inf), st.integers(0, 200)))
a_speed = st.one_of(st.builds(TierSpeed), st.builds(TierSpeed, seconds, seconds))
an_executor = st.builds(Executor, st.floats(1e-5, 1e-2), st.floats(0, 1e-7), st.floats(0, 1e-2))


@given(
    executor=an_executor,
    disk=a_tier,
    redis=a_tier,
    disk_speed=a_speed,
    redis_speed=a_speed,
    num_disk=st.integers(0, 200),
    num_redis=st.integers(0, 200),
    num_tail_tokens=st.integers(1, 3000),
    num_device_blocks=st.integers(0, 100),
    queue_s=st.one_of(st.just(0.0), seconds),
    noise=st.floats(0, 0.03),
)
def test_no_request_is_more_than_five_percent_slower_than_computing(
    executor: Executor,
    disk: Tier,
    redis: Tier,
    disk_speed: TierSpeed,
    redis_speed: TierSpeed,
    num_disk: int,
    num_redis: int,
    num_tail_tokens: int,
    num_device_blocks: int,
    queue_s: float,
    noise: float,
) -> None:
    """Tiers are as they are, what is believed of them is anything, and they may stop in the middle."""
    policy = LoadPolicy(BLOCK_SIZE, learned(executor, noise))
    policy.speeds.update(disk=disk_speed, redis=redis_speed)
    tiers = ["disk"] * num_disk + ["redis"] * num_redis
    begin = num_device_blocks * BLOCK_SIZE
    prompt = Prompt(begin, begin + len(tiers) * BLOCK_SIZE + num_tail_tokens, tiers, queue_s=queue_s)
    recompute_s = queue_s + executor.seconds(prompt.begin, prompt.end)

    found_s = time_to_first_token(policy, prompt, executor, {"disk": disk, "redis": redis})

    assert found_s <= 1.05 * recompute_s


@given(
    executor=st.builds(Executor, st.floats(1e-4, 1e-2), st.floats(0, 1e-7)),
    share=st.floats(0.0, 0.5),
    num_blocks=st.integers(20, 400),
)
def test_a_tier_that_is_known_to_be_fast_is_used(executor: Executor, share: float, num_blocks: int) -> None:
    policy = LoadPolicy(BLOCK_SIZE, learned(executor))
    block_s = share * executor.token_s * BLOCK_SIZE
    policy.speed("disk").note(100, block_s, 100 * block_s)
    prompt = Prompt(0, num_blocks * BLOCK_SIZE + 1, ["disk"] * num_blocks)

    assert policy.decide(prompt).num_blocks == num_blocks


def test_the_head_is_loaded_when_the_tail_is_in_a_slow_tier() -> None:
    policy = LoadPolicy(BLOCK_SIZE, learned(Executor()))
    policy.speed("shm").note(100, 1e-3, 0.1)
    policy.speed("redis").note(100, 1.0, 100.0)
    tiers = ["shm"] * 30 + ["redis"] * 30

    decision = policy.decide(Prompt(0, 1000, tiers))

    assert (decision.num_blocks, decision.declined_tier) == (30, "redis")


def test_a_slow_tier_is_used_for_what_comes_while_the_request_waits_anyway() -> None:
    policy = LoadPolicy(BLOCK_SIZE, learned(Executor()))
    policy.speed("disk").note(100, 0.02, 2.0)
    tiers = ["disk"] * 32

    assert policy.decide(Prompt(0, 1000, tiers)).num_blocks == 0
    assert 16 <= policy.decide(Prompt(0, 1000, tiers, queue_s=0.5)).num_blocks <= 32


def test_before_anything_was_computed_loading_is_tried_for_a_short_time() -> None:
    policy = LoadPolicy(BLOCK_SIZE, PrefillTime(StepTimeModel(), MAX_STEP_TOKENS))

    decision = policy.decide(Prompt(0, 100, ["disk"] * 6))

    assert decision.num_blocks == 6
    assert 0 < decision.patience.seconds(6) <= 0.5
    assert policy.decide(Prompt(0, 100, [])).num_blocks == 0


def test_a_load_behind_other_transfers_counts_their_time() -> None:
    policy = LoadPolicy(BLOCK_SIZE, learned(Executor()))
    policy.speed("shm").note(100, 1e-3, 0.1)
    tiers = ["shm"] * 60

    assert policy.decide(Prompt(0, 1000, tiers)).num_blocks == 60
    assert policy.decide(Prompt(0, 1000, tiers, transfers_s=2.0)).num_blocks == 0


def test_a_short_step_that_seems_to_cost_nothing_does_not_make_blocks_worth_nothing() -> None:
    """On a GPU a step of 16 tokens takes no longer than any other: the weights are read once."""
    model = StepTimeModel()
    for _ in range(20):
        for begin, end, taken_s in ((0, 8192, 0.215), (8192, 16_000, 0.262), (15_984, 16_000, 0.0055)):
            model.learn(_work(begin, end), taken_s)
        model.learn(StepWork(num_decodes=1, num_context_tokens=16_000), 0.0065)
    prefill = PrefillTime(model, 8192)
    prefill.note_prefill()
    prompt = Prompt(0, 16_000, ["shm"] * 999)

    assert model.predict_s(_work(0, 16)) < model.predict_s(StepWork())
    assert LoadPolicy(16, prefill).patience(prompt).seconds(999) > 0.2
