"""What the scheduler's core costs: microseconds of CPU per step with full seats and a long queue. No executor, no clock inside.

    make bench-scheduler                  256 running, 1,000, 10,000 and 100,000 waiting, each policy beside FCFS

Every step samples a token for each decode; outputs end after 40 to 360 tokens, so that about one request a step ends and
another is admitted. Time of a step is schedule() and apply(), the median of several rounds. Making tokens, which is the
executor's work, is not in it; nor is what follows for streams, which bench.edge shows.
"""

import random
import statistics
import time
from collections.abc import Callable

from common.block_hash import root_key
from common.ids import RequestId
from scheduler_svc.core.policies.fair_share import FairShare
from scheduler_svc.core.policies.fcfs import Fcfs
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.policies.strict_priority import StrictPriority
from scheduler_svc.core.request import Request, SamplingParams, ServiceClass, StopConditions
from scheduler_svc.core.scheduler import Scheduler, SchedulerConfig

NUM_RUNNING = 256
BLOCK_SIZE = 16
NUM_ROUNDS, STEPS_PER_ROUND = 7, 60
_ROOT = root_key(bytes(32))


def make_request(number: int, rng: random.Random) -> Request:
    """A prompt of 32 to 400 tokens that shares nothing with others."""
    prompt = tuple(rng.randrange(50_000) for _ in range(rng.randint(32, 400)))
    return Request(
        request_id=RequestId(f"r{number}"),
        prompt_token_ids=prompt,
        sampling=SamplingParams(),
        stop=StopConditions(rng.randint(40, 360)),
        root_key=_ROOT,
        arrival_s=number * 1e-3,
        tenant=f"t{rng.randrange(16)}",
        service_class=rng.choice(list(ServiceClass)),
    )


def measure(scheduler: Scheduler, now_s: float) -> tuple[float, float]:
    """Microseconds of schedule and of apply, medians over rounds of their means."""
    schedules, applies = [], []
    for _ in range(NUM_ROUNDS):
        schedule_s = apply_s = 0.0
        for _ in range(STEPS_PER_ROUND):
            now_s += 0.02
            began = time.thread_time()
            plan = scheduler.schedule(now_s)
            schedule_s += time.thread_time() - began
            assert plan is not None
            token_ids = {chunk.seq_id: 7 for chunk in plan.chunks}
            began = time.thread_time()
            scheduler.apply(plan.step_id, token_ids, {})
            apply_s += time.thread_time() - began
        schedules.append(schedule_s / STEPS_PER_ROUND * 1e6)
        applies.append(apply_s / STEPS_PER_ROUND * 1e6)
    return statistics.median(schedules), statistics.median(applies)


def loaded(scheduler: Scheduler, num_waiting: int) -> float:
    """Fills the seats and the queue. Returns the time."""
    rng = random.Random(1)
    for number in range(NUM_RUNNING + num_waiting):
        scheduler.add(make_request(number, rng))
    now_s = 1000.0
    while scheduler.stats().num_running_sequences < NUM_RUNNING:
        now_s += 0.02
        plan = scheduler.schedule(now_s)
        assert plan is not None
        scheduler.apply(plan.step_id, {chunk.seq_id: 7 for chunk in plan.chunks}, {})
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
    """Prints a table."""
    policies: dict[str, Callable[[], Policy]] = {"fcfs": Fcfs, "fair": FairShare, "priority": StrictPriority}
    print("us of CPU a step, 256 running; 16 tenants, three classes\n")
    print("  waiting  policy    schedule   apply    step   beside fcfs")
    for num_waiting in (1000, 10_000, 100_000):
        first_us = 0.0
        for name, make_policy in policies.items():
            scheduler = Scheduler(config(num_waiting), policy=make_policy())
            schedule_us, apply_us = measure(scheduler, loaded(scheduler, num_waiting))
            step_us = schedule_us + apply_us
            first_us = first_us or step_us
            figures = f"{schedule_us:10.0f}{apply_us:8.0f}{step_us:8.0f}{step_us / first_us:13.2f}"
            print(f"{num_waiting:>9}  {name:<8}{figures}", flush=True)


if __name__ == "__main__":
    main()
