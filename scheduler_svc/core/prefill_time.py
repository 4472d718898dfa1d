"""How long it takes to compute a part of a prompt, from the learned times of steps. Pure.

Computing is said to be dear only as far as it is known to be: what is not known counts for less, because a load may take as
long as the computing that it saves.
"""

from scheduler_svc.core.step_time import StepTimeModel, StepWork


class PrefillTime:
    """Of one executor.

    Args:
        step_times: learned by whoever sees the steps.
        max_step_tokens: most tokens of one prompt in one step.
    """

    def __init__(self, step_times: StepTimeModel, max_step_tokens: int):
        self._step_times = step_times
        self._max_step_tokens = max_step_tokens
        self._has_prefilled = False

    def note_prefill(self) -> None:
        """A step with part of a prompt was learned from."""
        self._has_prefilled = True

    @property
    def is_known(self) -> bool:
        """Whether a step with part of a prompt was seen."""
        return self._has_prefilled

    @property
    def trust(self) -> float:
        """Share of a predicted time that certainly is saved, at most 1."""
        return max(0.4, 0.95 - self._step_times.relative_error)

    def seconds(self, begin: int, end: int) -> float:
        """To compute the tokens from begin to end behind those before."""
        total_s = 0.0
        for start in range(begin, end, self._max_step_tokens):
            total_s += self._step_times.predict_s(_work(start, min(end, start + self._max_step_tokens)))
        return total_s


def _work(begin: int, end: int) -> StepWork:
    """A chunk of a prompt."""
    num_tokens = end - begin
    return StepWork(num_prefill_tokens=num_tokens, num_attended=num_tokens * begin + num_tokens * (num_tokens + 1) // 2)
