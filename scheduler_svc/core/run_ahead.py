"""How many steps are sent ahead of their results. Pure: measurements are handed in.

What a result causes (the next plan, text, messages) takes the scheduler a while, now and then tens of milliseconds; the executor
must have steps left meanwhile. Two are enough where a step takes that long. Of short decode steps more are sent. What that costs:
a stop that is only seen in a token is found so many steps late, and a new request waits for what is under way. Steps with
prompts are long and never pile up.
"""

COVERED_S = 0.03
"""Time that the steps under way should last."""
MAX_STEPS = 8
_WEIGHT = 0.1


class RunAhead:
    """The depth for one executor.

    Args:
        least: steps under way that are always allowed.
    """

    def __init__(self, least: int):
        self._least = least
        self._decode_step_s = 0.0

    def note_step(self, num_prefill_tokens: int, seconds: float) -> None:
        """A step ended."""
        if num_prefill_tokens == 0 and seconds > 0:
            known = self._decode_step_s or seconds
            self._decode_step_s = known + _WEIGHT * (seconds - known)

    def num_steps(self, *, any_prefill: bool) -> int:
        """Steps that may be under way.

        Args:
            any_prefill: whether one of those that are computes prompt tokens.
        """
        if any_prefill or self._decode_step_s == 0.0:
            return self._least
        return max(self._least, min(MAX_STEPS, -int(-COVERED_S // self._decode_step_s)))
