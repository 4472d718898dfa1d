"""How many executors the expected load needs. Pure: from a load forecast and the learned times of steps.

What an executor can do is measured, not set: the seconds that a prompt token and an output token take it in steps as full as its
memory allows. Needed is what the forecast does not exceed nine times in ten, together with what waits already.
"""

import math
from dataclasses import dataclass

from scheduler_svc.core.step_time import StepTimeModel, StepWork

SURE = 0.9
"""Quantile of the forecast that executors are wanted for."""
_MAX_UTILISATION = 0.8
"""Above, queues grow with every burst."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Of some seconds.

    Attributes:
        num_prompt_tokens: that have to be computed, without those that are cached.
        num_output_tokens: that have to be drawn.
        seconds: in which they come.
    """

    num_prompt_tokens: float
    num_output_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ExecutorCapacity:
    """What one executor can do.

    Attributes:
        prompt_token_s: seconds of a prompt token in a full step.
        output_token_s: seconds of an output token in a full batch.
    """

    prompt_token_s: float
    output_token_s: float

    def executors(self, demand: Demand) -> float:
        """How many executors like this one the demand keeps busy, at the utilisation that leaves room for bursts."""
        busy_s = demand.num_prompt_tokens * self.prompt_token_s + demand.num_output_tokens * self.output_token_s
        return busy_s / (demand.seconds * _MAX_UTILISATION)


def measured_capacity(
    step_times: StepTimeModel, max_step_tokens: int, max_sequences: int, num_cache_tokens: int, mean_sequence_tokens: float
) -> ExecutorCapacity | None:
    """What an executor can do, as far as its steps have told.

    Args:
        step_times: of its steps.
        max_step_tokens: of a step.
        max_sequences: of its batch.
        num_cache_tokens: that its blocks can hold.
        mean_sequence_tokens: of a sequence in the middle of its answer, prompt included.

    Returns:
        None: too few steps were seen.
    """
    if not step_times.is_learned:
        return None
    num_decodes = max(1, min(max_sequences, int(num_cache_tokens / max(1.0, mean_sequence_tokens))))
    decodes = StepWork(num_decodes=num_decodes, num_context_tokens=int(num_decodes * mean_sequence_tokens))
    prompts = StepWork(num_prefill_tokens=max_step_tokens, num_attended=int(max_step_tokens * mean_sequence_tokens / 2))
    return ExecutorCapacity(step_times.predict_s(prompts) / max_step_tokens, step_times.predict_s(decodes) / num_decodes)


def desired_executors(capacity: ExecutorCapacity | None, demand: Demand, num_now: int) -> int:
    """Executors that the demand wants; at least 1, and as many as there are while nothing is known."""
    if capacity is None:
        return max(1, num_now)
    return max(1, math.ceil(capacity.executors(demand) - 1e-9))
