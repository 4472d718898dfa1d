"""What a simulation has shown: every request and samples of the whole over time. Plain data and its figures."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler_svc.simulation.arrivals import Arrival


@dataclass(slots=True)
class Served:
    """What became of one request; seconds from the start.

    Attributes:
        first_s, last_s: of its tokens; None: it got none.
        num_tokens: that it got.
        error: why it failed; empty: it did not.
    """

    arrival: Arrival
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token."""
        return None if self.first_s is None else self.first_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float | None:
        """Between tokens."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Sample:
    """All executors at one moment.

    Attributes:
        tokens_by_tenant: prompt and output tokens served since the start.
    """

    at_s: float
    num_waiting: int
    num_running: int
    num_used_blocks: int
    num_blocks: int
    tokens_by_tenant: dict[str, int]


@dataclass(slots=True)
class Outcome:
    """A whole simulation.

    Attributes:
        took_s: of real time.
        busy_s: of steps, all executors.
        num_recomputed_tokens: that were computed again because their sequence had lost its blocks.
    """

    policy: str
    served: list[Served] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    end_s: float = 0.0
    took_s: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0

    def of(self, wanted: Callable[[Arrival], bool]) -> list[Served]:
        """Some of the requests."""
        return [one for one in self.served if wanted(one.arrival)]

    @property
    def num_output_tokens(self) -> int:
        """Of all requests."""
        return sum(one.num_tokens for one in self.served)


def ttfts(served: Sequence[Served]) -> list[float]:
    """Seconds to the first token of those that got one."""
    return [one.ttft_s for one in served if one.ttft_s is not None]


def tpots(served: Sequence[Served]) -> list[float]:
    """Seconds between tokens of those that got two."""
    return [one.tpot_s for one in served if one.tpot_s is not None]


def percentile(values: Sequence[float], percent: int) -> float:
    """Linear between neighbours; 0 of nothing."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
