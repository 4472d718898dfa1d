"""A simulated run beside the real one with the same arrivals: how far apart they are, request by request. Pure."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler_svc.simulation.outcome import Served


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of one figure.

    Attributes:
        real_s, simulated_s: medians.
        median_error: of |simulated - real| / real over requests.
        error_of_median: of the medians themselves, likewise.
    """

    figure: str
    real_s: float
    simulated_s: float
    median_error: float

    @property
    def error_of_median(self) -> float:
        """|simulated - real| / real of the medians."""
        return abs(self.simulated_s - self.real_s) / self.real_s


def compare(real: Sequence[Served], simulated: Sequence[Served]) -> list[Agreement]:
    """TTFT and TPOT; requests in the same order."""
    return [
        _agreement("TTFT", real, simulated, lambda one: one.ttft_s),
        _agreement("TPOT", real, simulated, lambda one: one.tpot_s),
    ]


def _agreement(
    figure: str, real: Sequence[Served], simulated: Sequence[Served], value: Callable[[Served], float | None]
) -> Agreement:
    pairs = [(value(a), value(b)) for a, b in zip(real, simulated, strict=True)]
    known = [(a, b) for a, b in pairs if a is not None and b is not None and a > 0]
    return Agreement(
        figure,
        statistics.median(a for a, _ in known),
        statistics.median(b for _, b in known),
        statistics.median(abs(b - a) / a for a, b in known),
    )
