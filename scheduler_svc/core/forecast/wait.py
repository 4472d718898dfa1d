"""How long a request will wait at one executor, and when it will be through. Pure: from what is there and learned times of steps.

Three things may be short: computing (prompts that come before), places in the batch, device blocks. Places and blocks come back
as running sequences end; so many are running and each stays so long, hence so many end in a second (J. D. C. Little, 1961). Steps
that let sequences end do not compute the prompts that come before, so the two times add up; of places and blocks the
scarcer one counts.
"""

from dataclasses import dataclass, replace

from scheduler_svc.core.step_time import StepTimeModel, StepWork


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is at an executor.

    Attributes:
        num_prompt_tokens: to be computed before a request that comes now: of prompts that were begun and of those that wait.
        num_waiting: sequences that wait for a place.
        num_running: sequences in the batch.
        num_seats: most sequences in the batch.
        num_blocks: of the device.
        num_used_blocks: that running sequences hold.
        block_size: tokens of a block.
        num_output_tokens: of an answer, on average.
    """

    num_prompt_tokens: int
    num_waiting: int
    num_running: int
    num_seats: int
    num_blocks: int
    num_used_blocks: int
    block_size: int
    num_output_tokens: float


class WaitForecast:
    """Of one executor.

    Args:
        step_times: learned by whoever sees the steps.
        max_step_tokens: most prompt tokens of a step.
    """

    def __init__(self, step_times: StepTimeModel, max_step_tokens: int):
        self._step_times = step_times
        self._max_step_tokens = max_step_tokens

    @property
    def is_known(self) -> bool:
        """Whether enough steps were seen."""
        return self._step_times.is_learned

    def token_s(self, backlog: Backlog) -> float:
        """Between two tokens of a sequence when all that are here run, and one more."""
        return self._step_times.predict_s(self._decodes(backlog, 1))

    def expected_wait_s(self, backlog: Backlog, num_prompt_tokens: int) -> float:
        """Until a request that comes now may begin to compute; 0 as long as nothing is known.

        Args:
            backlog: what is there.
            num_prompt_tokens: of the request, those that it needs blocks for.
        """
        if not self.is_known:
            return 0.0
        compute_s = self._prefill_s(backlog, backlog.num_prompt_tokens)
        # Seconds for all that run to end, one after another at the pace of now.
        turnover_s = backlog.num_output_tokens * self.token_s(backlog)
        seats_missing = backlog.num_waiting + 1 - (backlog.num_seats - backlog.num_running)
        seats_s = turnover_s * max(0, seats_missing) / max(1, backlog.num_running)
        num_needed = -(-(backlog.num_prompt_tokens + num_prompt_tokens) // backlog.block_size)
        blocks_missing = num_needed - (backlog.num_blocks - backlog.num_used_blocks)
        blocks_s = turnover_s * max(0, blocks_missing) / max(1, backlog.num_used_blocks)
        return compute_s + max(seats_s, blocks_s)

    def expected_finish_s(
        self, backlog: Backlog, num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: float
    ) -> float:
        """Until a request that comes now has its last token.

        Args:
            backlog: what is there.
            num_prompt_tokens: of the request.
            num_cached_tokens: of these, that are on the device.
            num_output_tokens: that it will probably get.
        """
        wait_s = self.expected_wait_s(backlog, num_prompt_tokens - num_cached_tokens)
        own_s = self._prefill_s(backlog, num_prompt_tokens - num_cached_tokens, num_cached_tokens)
        return wait_s + own_s + num_output_tokens * self.token_s(backlog)

    def _prefill_s(self, backlog: Backlog, num_tokens: int, begin: int = 0) -> float:
        """To compute tokens of prompts beside the decodes, in steps that are as full as may be."""
        num_full, num_left = divmod(max(0, num_tokens), self._max_step_tokens)
        full_s = self._prefill_step_s(backlog, self._max_step_tokens, begin) if num_full else 0.0
        return num_full * full_s + (self._prefill_step_s(backlog, num_left, begin) if num_left else 0.0)

    def _prefill_step_s(self, backlog: Backlog, num_tokens: int, begin: int) -> float:
        work = replace(
            self._decodes(backlog, 0),
            num_prefill_tokens=num_tokens,
            num_attended=num_tokens * begin + num_tokens * num_tokens // 2,
        )
        return self._step_times.predict_s(work)

    def _decodes(self, backlog: Backlog, num_more: int) -> StepWork:
        num_decodes = min(backlog.num_seats, backlog.num_running + num_more * (1 + backlog.num_waiting))
        num_tokens = backlog.num_used_blocks * backlog.block_size + num_more * backlog.num_prompt_tokens
        return StepWork(num_decodes=num_decodes, num_context_tokens=min(num_tokens, backlog.num_blocks * backlog.block_size))
