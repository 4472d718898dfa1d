"""A scheduler in virtual time, with an executor that takes step_s for every step and draws a token that ends nothing.

Keeps books of its own: what every tenant was served, and how long anybody waited, from plans and tables alone.
"""

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

from common.block_hash import root_key
from common.ids import RequestId
from scheduler_svc.core.plan import StepPlan
from scheduler_svc.core.policies import fair_share
from scheduler_svc.core.policies.policy import Policy
from scheduler_svc.core.request import Request, SamplingParams, ServiceClass, StopConditions
from scheduler_svc.core.scheduler import Scheduler, SchedulerConfig
from scheduler_svc.core.sequence import Sequence

_ROOT = root_key(bytes(32))
Lane = tuple[str, ServiceClass]


class Machine:
    """See the module's first lines.

    Attributes:
        service: virtual tokens by lane, not divided by weights.
        longest_run_s: from a first admission to the end of the sequence.
        longest_stay_s: in the batch without a break.
        inspect: called when a step has been planned.
    """

    def __init__(self, config: SchedulerConfig, policy: Policy, step_s: float = 0.05):
        self.config = config
        self.policy = policy
        self.scheduler = Scheduler(config, policy=policy)
        self.step_s = step_s
        self.now_s = 0.0
        self.inspect: Callable[[Machine], None] = lambda machine: None
        self.service: dict[Lane, float] = defaultdict(float)
        self.waiting: Counter[Lane] = Counter()
        self.longest_run_s = self.longest_stay_s = 0.0
        self._started_at_s: dict[int, float] = {}
        self.num_steps = 0
        self._admitted_at_s: dict[int, float] = {}
        self._lane_of: dict[int, Lane] = {}
        self._numbers = itertools.count()

    def add(
        self, num_prompt_tokens: int, num_output_tokens: int, tenant: str, service_class: ServiceClass, priority: int = 0
    ) -> None:
        number = next(self._numbers)
        request = Request(
            request_id=RequestId(f"r{number}"),
            prompt_token_ids=(number % 1000,) * num_prompt_tokens,
            sampling=SamplingParams(),
            stop=StopConditions(num_output_tokens),
            root_key=_ROOT,
            arrival_s=self.now_s,
            tenant=tenant,
            service_class=service_class,
            priority=priority,
        )
        (seq_id,) = self.scheduler.add(request)
        self._lane_of[seq_id] = tenant, service_class
        self.waiting[tenant, service_class] += 1

    def step(self) -> StepPlan | None:
        """Plans a step, carries it out, and moves time on."""
        plan = self.scheduler.schedule(self.now_s)
        self.inspect(self)
        self.now_s += self.step_s
        if plan is None:
            return None
        self.num_steps += 1
        for seq_id in plan.dropped_seq_ids:
            self._note_stay(seq_id)
        for new in plan.new_sequences:
            self._started_at_s[new.seq_id] = self.now_s - self.step_s
            if new.seq_id not in self._admitted_at_s:
                lane = self._lane_of[new.seq_id]
                self._admitted_at_s[new.seq_id] = self.now_s - self.step_s
                self.waiting[lane] -= 1
                self.service[lane] += new.num_prompt_tokens
        for chunk in plan.chunks:
            if chunk.num_tokens == 1:
                self.service[self._lane_of[chunk.seq_id]] += fair_share.DECODED_TOKEN
        for sequence in self.running():
            num_blocks = len(sequence.table.block_ids)
            self.service[self._lane_of[sequence.seq_id]] += fair_share.BLOCK_SECOND * num_blocks * self.step_s
        ends = {chunk.seq_id for chunk in plan.chunks}
        token_ids = dict.fromkeys(ends, 1)
        for update in self.scheduler.apply(plan.step_id, token_ids, {}):
            if update.finish_reason is not None:
                self._note_stay(update.seq_id)
                self.longest_run_s = max(self.longest_run_s, self.now_s - self._admitted_at_s[update.seq_id])
        return plan

    def _note_stay(self, seq_id: int) -> None:
        if (started_at_s := self._started_at_s.pop(seq_id, None)) is not None:
            self.longest_stay_s = max(self.longest_stay_s, self.now_s - started_at_s)

    def running(self) -> list[Sequence]:
        return list(self.scheduler._running)

    def has_steps_in_flight(self, sequence: Sequence) -> bool:
        return self.scheduler._session.outstanding.have(sequence)

    def num_blocks_needed(self, sequence: Sequence) -> int:
        return -(-len(sequence.token_ids) // self.config.block_size)


def config(**changes: int) -> SchedulerConfig:
    """Few seats and blocks, tokens for all of them in a step."""
    limits = SchedulerConfig(
        num_blocks=14,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        max_chunk_tokens=256,
        max_waiting_requests=10**6,
        max_waiting_tokens=10**9,
        prefix_caching=False,
    )
    return replace(limits, **changes)  # type: ignore[arg-type]


def some_load(rng: random.Random, lanes: list[Lane], rates: dict[Lane, float]) -> Callable[[Machine], None]:
    """Arrivals of all lanes, at so many a step each; prompts of 1 to 12 tokens, outputs of 1 to 16."""

    def arrive(machine: Machine) -> None:
        for lane in lanes:
            if rng.random() < rates[lane]:
                machine.add(rng.randint(1, 12), rng.randint(1, 16), *lane, priority=rng.choice([0, 0, 5]))

    return arrive
