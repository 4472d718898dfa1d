"""Requests through a real scheduler core and an engine on the GPU, in process; and what transformers makes of them."""

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from common.block_hash import root_key
from common.ids import RequestId
from executor_svc import convert as executor_convert
from executor_svc.engine import Engine
from executor_svc.runner import StepOutcome
from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc import convert
from scheduler_svc.core.request import Request, SamplingParams, StopConditions
from scheduler_svc.core.scheduler import Scheduler, SchedulerConfig


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        cancel_after: it is cancelled after so many steps; None: never.
    """

    prompt: Sequence[int]
    num_tokens: int
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    cancel_after: int | None = None


def answers(engine: Engine, asks: Sequence[Ask], *, run_ahead: int = 2, num_blocks: int | None = None) -> list[list[int]]:
    """Tokens of each request.

    Args:
        engine: of any device.
        asks: all at once.
        run_ahead: plans that are submitted before their results are there.
        num_blocks: fewer than the pool has, so that sequences are preempted; None: all.
    """
    engine.runner.reset()
    info = engine.info
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks or info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_chunk_tokens=min(24, info.max_num_batched_tokens),
        )
    )
    for number, ask in enumerate(asks):
        scheduler.add(
            Request(
                request_id=RequestId(str(number)),
                prompt_token_ids=tuple(ask.prompt),
                sampling=ask.sampling,
                stop=StopConditions(max_tokens=ask.num_tokens),
                root_key=root_key(info.kv_fingerprint),
                arrival_s=0.0,
            )
        )
    found: list[list[int]] = [[] for _ in asks]
    results: queue.SimpleQueue[StepOutcome | Exception] = queue.SimpleQueue()
    outstanding: list[int] = []
    num_steps = 0
    while True:
        for number, ask in enumerate(asks):
            if ask.cancel_after == num_steps:
                scheduler.cancel(RequestId(str(number)))
        while len(outstanding) < run_ahead and (plan := scheduler.schedule(float(num_steps))) is not None:
            message = pb.StepPlan.FromString(convert.plan_command(plan, plan.step_id).plan.SerializeToString())
            engine.runner.submit(executor_convert.plan_from_pb(message), results.put, arrived_at=time.monotonic())
            outstanding.append(plan.step_id)
        if not outstanding:
            return found
        outcome = results.get(timeout=60)
        if isinstance(outcome, Exception):
            raise outcome
        assert not outcome.failures, outcome.failures
        num_steps += 1
        result = executor_convert.outcome_to_pb(outcome, idle_s=0.0)
        updates = scheduler.apply(outstanding.pop(0), convert.sampled_tokens(result), convert.sequence_errors(result))
        for update in updates:
            found[int(update.request_id)] += update.token_ids


@torch.inference_mode()
def own_greedy_tokens(module: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What the model computes by itself: the whole sequence anew for every token, no cache."""
    ids = torch.tensor([list(prompt)], device="cuda")
    for _ in range(num_tokens):
        logits = module(input_ids=ids, use_cache=False).logits[0, -1]
        ids = torch.cat([ids, logits.argmax()[None, None]], dim=1)
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


def drawn(**changes: Any) -> SamplingParams:
    """Sampling that draws."""
    return replace(SamplingParams(temperature=1.0), **changes)
