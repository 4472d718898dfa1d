"""How many prompt tokens a step takes beside decodes. Pure; knows times of steps, no sequences.

All prompts of a step get their first token when the whole step is over, and every decode waits for it, so steps should be
short. But each step also pays for its decodes and for being a step, so many short ones do less in the end. The balance: its
prompt tokens take so many times as long as all else of it. When more than a few steps' prompts wait, first tokens are late
anyway, and what counts is how soon all are through.

While somebody may come who should not have to wait, steps with prompts of others are short: a few times as long as an empty one,
so that not more than a certain share of the time goes into being interruptible. In such steps prompts get what decodes leave; so
fewer sequences join, until decodes and prompts are in balance.

Where a running sequence has a target for the time between its tokens, that is a bound on all this: a chunk is as long as the step
is expected to stay within it, whatever it costs the prompts.
"""

import sys
from dataclasses import replace
from typing import Protocol

from scheduler_svc.core.step_time import MANY_PREFILL_TOKENS, StepTimeModel, StepWork

TIMES_ALL_ELSE = 8
"""Simulated on the Azure trace: the throughput of the largest steps; at 4 the queue of an overload grows."""
BACKLOG_STEPS = 2
LEAST_TOKENS = 2048
"""Smaller steps use a large device badly."""
TARGET_MARGIN = 0.9
"""Of a target: the rest is for what lies between two steps, and for predictions that are short."""
LEAST_CHUNK_TOKENS = 32
SHORT_STEP_S = 0.01
"""Nobody notices shorter ones."""
LEAST_SHORT_TOKENS = 64
"""Of a short step's prompts, however many decodes there are."""


class PrefillBudget(Protocol):
    """The policy."""

    def num_tokens(self, decodes: StepWork, num_waiting_tokens: int) -> int:
        """The most prompt tokens of a step; more than it has: all it has.

        Args:
            decodes: that are in it.
            num_waiting_tokens: of prompts that were not begun.
        """
        ...

    def num_tokens_within(self, step_s: float, work: StepWork, begin: int, num_tokens: int) -> int:
        """How many of a chunk's tokens a step takes that must not be longer.

        Args:
            step_s: the bound.
            work: that is in the step.
            begin: tokens of the chunk's sequence before it.
            num_tokens: of the chunk; at least 1.

        Returns:
            At least 1 in a step without other chunks: nobody waits for ever because of others' targets.
        """
        ...

    def num_tokens_if_short(self, times_empty: float, work: StepWork, begin: int, num_tokens: int) -> int:
        """How many of a chunk's tokens a step takes that should be short, for the sake of somebody who may come.

        Args:
            times_empty: how long it should be, in empty steps.
            work: that is in the step.
            begin: tokens of the chunk's sequence before it.
            num_tokens: of the chunk; at least 1.
        """
        ...


class WholeSteps:
    """No limit but the step's own."""

    def num_tokens(self, decodes: StepWork, num_waiting_tokens: int) -> int:
        """See PrefillBudget."""
        return sys.maxsize

    def num_tokens_within(self, step_s: float, work: StepWork, begin: int, num_tokens: int) -> int:
        """Knows no times."""
        return num_tokens

    def num_tokens_if_short(self, times_empty: float, work: StepWork, begin: int, num_tokens: int) -> int:
        """Knows no times."""
        return num_tokens


class InProportion:
    """In proportion to the time of the decodes, see the module's first lines.

    Args:
        step_times: of its steps.
        max_tokens: of a step.
    """

    def __init__(self, step_times: StepTimeModel, max_tokens: int):
        self._step_times = step_times
        self._max_tokens = max_tokens

    def num_tokens(self, decodes: StepWork, num_waiting_tokens: int) -> int:
        """See PrefillBudget."""
        is_backlog = num_waiting_tokens > BACKLOG_STEPS * self._max_tokens
        if is_backlog or decodes.num_decodes == 0 or not self._step_times.is_learned or self._max_tokens <= LEAST_TOKENS:
            return self._max_tokens
        fewer_s, more_s = (self._predict_s(decodes, num) for num in (MANY_PREFILL_TOKENS + 1, LEAST_TOKENS))
        per_token_s = (more_s - fewer_s) / (LEAST_TOKENS - MANY_PREFILL_TOKENS - 1)
        all_else_s = more_s - LEAST_TOKENS * per_token_s
        if per_token_s <= 0.0:
            return self._max_tokens
        return min(self._max_tokens, max(LEAST_TOKENS, int(TIMES_ALL_ELSE * all_else_s / per_token_s)))

    def num_tokens_within(self, step_s: float, work: StepWork, begin: int, num_tokens: int) -> int:
        """See PrefillBudget."""
        if not self._step_times.is_learned:
            return num_tokens
        bound_s = TARGET_MARGIN * step_s
        if self._step_times.predict_s(_with_chunk(work, begin, num_tokens)) <= bound_s:
            return num_tokens
        fits, fails = 0, num_tokens
        while fails - fits > max(1, fits // 16):
            middle = (fits + fails) // 2
            if self._step_times.predict_s(_with_chunk(work, begin, middle)) <= bound_s:
                fits = middle
            else:
                fails = middle
        if work.num_prefill_tokens:
            return fits if fits >= LEAST_CHUNK_TOKENS else 0
        return max(fits, min(num_tokens, LEAST_CHUNK_TOKENS))

    def num_tokens_if_short(self, times_empty: float, work: StepWork, begin: int, num_tokens: int) -> int:
        """See PrefillBudget."""
        short_s = max(SHORT_STEP_S, times_empty * self._predict_s(StepWork(), 1))
        num_within = self.num_tokens_within(short_s, work, begin, num_tokens)
        return num_within if work.num_prefill_tokens else max(num_within, min(num_tokens, LEAST_SHORT_TOKENS))

    def _predict_s(self, decodes: StepWork, num_prefill_tokens: int) -> float:
        """A step of decodes and one prompt."""
        num_attended = num_prefill_tokens * num_prefill_tokens // 2
        return self._step_times.predict_s(replace(decodes, num_prefill_tokens=num_prefill_tokens, num_attended=num_attended))


def _with_chunk(work: StepWork, begin: int, num_tokens: int) -> StepWork:
    num_attended = num_tokens * begin + num_tokens * (num_tokens + 1) // 2
    return replace(
        work,
        num_prefill_tokens=work.num_prefill_tokens + num_tokens,
        num_attended=work.num_attended + num_attended,
    )
