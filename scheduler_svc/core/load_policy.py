"""How many stored blocks are loaded, and how long for, instead of computing them. Pure: figures and times are handed in.

A request must not wait longer for its blocks than computing all of them would have taken, by more than 5 %. It cannot be known
how fast a tier will be, so the promise does not rest on that. It rests on a deadline that moves:

    time for k+1 blocks  <=  slack + k * gain         slack: 4 % of the time to compute everything, less what the look-up took
                                                      gain: least time that each loaded block saves

Whenever a load is cut, what has arrived has paid for the time that passed, but for the slack. Expected speeds only decide
whether a load is worth trying, and how far: tiers in their order along the prefix, up to the block where it is expected to pay
most. A tier of which nothing is known is taken to be fast; if it is not, that costs the slack, once.

While steps for others are queued at the executor, the request could not run anyway: that time is added to the slack.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf

from common.patience import Patience
from scheduler_svc.core.prefill_time import PrefillTime
from scheduler_svc.core.tier_speed import TierSpeed

SLACK = 0.04
"""Of 5 %: the rest is for what nobody measures, from a cut to the step that follows it."""
LOOKUP_SHARE = 0.025
"""Of the time to compute everything: within the slack."""
_SHORTEST_LOOKUP_S = 0.002
"""A store that is well answers in this time, and a shorter wait would be in vain."""
_SHORTEST_LOAD_S = 0.001
"""No tier has a block on the device sooner."""
_NONE = Patience(0.0)
_UNKNOWN = Patience(0.25)
"""Before anything was computed there is nothing to compare with."""


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """What to do about the found blocks.

    Attributes:
        num_blocks: to load, from the first; 0: none.
        patience: from now.
        declined_tier: the tier of the next block, which is not loaded because it is expected to be slow; empty: none.
    """

    num_blocks: int
    patience: Patience = _NONE
    declined_tier: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Prompt:
    """What is to be computed or loaded.

    Attributes:
        begin: tokens that are on the device.
        end: tokens of the prompt.
        tiers: of the blocks behind begin that the store has.
        spent_s: since the request came.
        queue_s: until it could run in any case.
        transfers_s: until the transfers that were begun before are expected to end.
    """

    begin: int
    end: int
    tiers: Sequence[str]
    spent_s: float = 0.0
    queue_s: float = 0.0
    transfers_s: float = 0.0

    def __repr__(self) -> str:
        """In short: found blocks are counted by tier."""
        tiers = {tier: self.tiers.count(tier) for tier in self.tiers}
        times = f"spent {self.spent_s:.4f} s, queue {self.queue_s:.3f} s, transfers {self.transfers_s:.3f} s"
        return f"tokens {self.begin} to {self.end}, found {tiers}, {times}"


class LoadPolicy:
    """Decides for one executor.

    Attributes:
        speeds: by tier, as loads and probes measured them.
    """

    def __init__(self, block_size: int, prefill: PrefillTime):
        self.speeds: dict[str, TierSpeed] = {}
        self._block_size = block_size
        self._prefill = prefill

    def speed(self, tier: str) -> TierSpeed:
        """Of a tier, known or not."""
        return self.speeds.setdefault(tier, TierSpeed())

    def forget(self, tier: str) -> None:
        """Nothing is known of a tier any more, so that it is tried."""
        self.speeds.pop(tier, None)

    def decide(self, prompt: Prompt) -> LoadDecision:
        """How many of the found blocks to load, and how long for."""
        if not prompt.tiers:
            return LoadDecision(0)
        if not self._prefill.is_known:
            return LoadDecision(len(prompt.tiers), _UNKNOWN)
        patience = self.patience(prompt)
        if patience.first_s < _SHORTEST_LOAD_S:
            return LoadDecision(0)
        compute_s = self._prefill.seconds(prompt.begin, prompt.end)
        best, best_s = 0, prompt.queue_s + compute_s
        for num_blocks, loaded_s in self._stages(prompt, patience):
            rest_s = self._prefill.seconds(prompt.begin + num_blocks * self._block_size, prompt.end)
            total_s = max(prompt.queue_s, loaded_s) + rest_s
            if total_s < best_s:
                best, best_s = num_blocks, total_s
        declined_tier = prompt.tiers[best] if best < len(prompt.tiers) else ""
        return LoadDecision(best, patience, declined_tier)

    def lookup_wait_s(self, prompt: Prompt) -> float:
        """How long it is worth waiting to hear what the store has; without bound as long as nothing was computed."""
        if not self._prefill.is_known:
            return inf
        total_s = prompt.queue_s + self._prefill.seconds(prompt.begin, prompt.end)
        return max(_SHORTEST_LOOKUP_S, LOOKUP_SHARE * total_s)

    def patience(self, prompt: Prompt) -> Patience:
        """How long the prompt's blocks are waited for."""
        compute_s = self._prefill.seconds(prompt.begin, prompt.end)
        slack_s = prompt.queue_s + SLACK * (prompt.queue_s + compute_s) - prompt.spent_s
        saved_s = min(self._saved_s(prompt, compute_s, num_blocks) / num_blocks for num_blocks in (1, len(prompt.tiers)))
        return Patience(max(0.0, slack_s), self._prefill.trust * max(0.0, saved_s))

    def _saved_s(self, prompt: Prompt, compute_s: float, num_blocks: int) -> float:
        """By not computing the first blocks: the rest still takes its steps, so what a step costs by itself is not saved."""
        return compute_s - self._prefill.seconds(prompt.begin + num_blocks * self._block_size, prompt.end)

    def _stages(self, prompt: Prompt, patience: Patience) -> Iterator[tuple[int, float]]:
        """Ends of runs of one tier, as far as all before them is expected to come in time: (blocks, seconds until then)."""
        num_blocks, seconds = 0, prompt.transfers_s
        for tier, run in groupby(prompt.tiers):
            num_in_run, speed = sum(1 for _ in run), self.speed(tier)
            for num_loaded in _checkpoints(num_in_run):
                if seconds + speed.seconds(num_loaded) > patience.seconds(num_blocks + num_loaded - 1):
                    return
                yield num_blocks + num_loaded, seconds + speed.seconds(num_loaded)
            num_blocks += num_in_run
            seconds += speed.seconds(num_in_run)


def _checkpoints(num_blocks: int) -> Iterator[int]:
    """Some numbers of blocks up to this one, close to each other at the start: 1, 2, 4, ... num_blocks."""
    num_loaded = 1
    while num_loaded < num_blocks:
        yield num_loaded
        num_loaded *= 2
    yield num_blocks
