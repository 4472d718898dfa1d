"""What the scheduler's core costs: microseconds of CPU per step with full seats and a long queue. No executor, no clock inside.

    make bench-scheduler                  256 running, 1,000, 10,000 and 100,000 waiting, each policy beside FCFS

Every step samples a token for each decode; outputs end after 40 to 360 tokens, so that about one request a step ends and
another is admitted. Time of a step is schedule() and apply(), the median of several rounds.
"""

import random
import statistics
import sys
import time

from common.block_hash import root_key
from common.ids import RequestId
from scheduler_svc.core.plan import SampledToken
from scheduler_svc.core.request import Request, SamplingParams, StopConditions
from scheduler_svc.core.scheduler import Scheduler, SchedulerConfig

NUM_RUNNING = 256
BLOCK_SIZE = 16
NUM_ROUNDS, STEPS_PER_ROUND = 7, 60
_ROOT = root_key(bytes(32))


def make_request(number: int, rng: random.Random, **qos: object) -> Request:
    """A prompt of 32 to 400 tokens that shares nothing with others."""
    prompt = tuple(rng.randrange(50_000) for _ in range(rng.randint(32, 400)))
    return Request(
        RequestId(f"r{number}"), prompt, SamplingParams(), StopConditions(rng.randint(40, 360)), _ROOT, number * 1e-3, **qos
    )  # type: ignore[arg-type]


def measure(scheduler: Scheduler, now_s: float) -> tuple[float, float]:
    """Microseconds of schedule and of apply, medians over rounds of their means."""
    schedules, applies = [], []
    for _ in range(NUM_ROUNDS):
        schedule_s = apply_s = 0.0
        for _ in range(STEPS_PER_ROUND):
            now_s += 0.02
            began = time.perf_counter()
            plan = scheduler.schedule(now_s)
            schedule_s += time.perf_counter() - began
            assert plan is not None
            sampled = [SampledToken(chunk.seq_id, 7) for chunk in plan.chunks]
            began = time.perf_counter()
            scheduler.apply(plan.step_id, sampled, {})
            apply_s += time.perf_counter() - began
        schedules.append(schedule_s / STEPS_PER_ROUND * 1e6)
        applies.append(apply_s / STEPS_PER_ROUND * 1e6)
    return statistics.median(schedules), statistics.median(applies)


def loaded(scheduler: Scheduler, num_waiting: int, tenants: int = 1) -> float:
    """Fills the seats and the queue. Returns the time."""
    rng = random.Random(1)
    for number in range(NUM_RUNNING + num_waiting):
        scheduler.add(make_request(number, rng))
    now_s = 1000.0
    while scheduler.stats().num_running_sequences < NUM_RUNNING:
        now_s += 0.02
        plan = scheduler.schedule(now_s)
        assert plan is not None
        scheduler.apply(plan.step_id, [SampledToken(chunk.seq_id, 7) for chunk in plan.chunks], {})
    return now_s


def config(num_waiting: int) -> SchedulerConfig:
    """Room for all."""
    return SchedulerConfig(
        num_blocks=16_384,
        block_size=BLOCK_SIZE,
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=8192,
        max_chunk_tokens=8192,
        max_waiting_requests=num_waiting + NUM_RUNNING,
        max_waiting_tokens=1 << 40,
    )


def main() -> None:
    for num_waiting in (1000, 10_000, 100_000)[: int(sys.argv[1]) if len(sys.argv) > 1 else 3]:
        scheduler = Scheduler(config(num_waiting))
        now_s = loaded(scheduler, num_waiting)
        schedule_us, apply_us = measure(scheduler, now_s)
        print(
            f"{num_waiting:>7} waiting: schedule {schedule_us:6.0f} us, apply {apply_us:6.0f} us, step {schedule_us + apply_us:6.0f} us"
        )


if __name__ == "__main__":
    main()
