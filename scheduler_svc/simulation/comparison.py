"""Simulated runs beside the real one with the same arrivals: how far apart they are, request by request. Pure.

Two runs of the same arrivals are never alike, real or simulated: a step that takes a few milliseconds more decides who is in
the next one. So there are several simulated runs with other seeds. What a simulation says of a request is the median of them;
and how far two of them are apart is how far two runs have to be expected to be.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler_svc.simulation.outcome import Served, percentile


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of one figure. Errors are |simulated - real| / real.

    Attributes:
        real_s, simulated_s: medians over requests, of the simulated also over runs.
        median_error, p90_error: over requests, of the median of all runs.
        median_error_of_one: over requests, of a single run; the mean over runs.
        median_between: over requests, of a simulated run against another one; the mean over runs. None: there is one run.
    """

    figure: str
    real_s: float
    simulated_s: float
    median_error: float
    p90_error: float
    median_error_of_one: float
    median_between: float | None

    @property
    def error_of_median(self) -> float:
        """Of the medians themselves."""
        return abs(self.simulated_s - self.real_s) / self.real_s

    def __str__(self) -> str:
        between = "" if self.median_between is None else f"; two simulated runs differ by {100 * self.median_between:.1f} %"
        return (
            f"{self.figure}: recorded {1e3 * self.real_s:.1f} ms, simulated {1e3 * self.simulated_s:.1f} ms (medians, "
            f"{100 * self.error_of_median:.1f} % apart); of a request: median error {100 * self.median_error:.1f} %, "
            f"p90 {100 * self.p90_error:.1f} % (of one run {100 * self.median_error_of_one:.1f} %{between})"
        )


def compare(real: Sequence[Served], runs: Sequence[Sequence[Served]]) -> list[Agreement]:
    """TTFT and TPOT, of those that have them everywhere; requests in the same order. Nothing of what nobody has."""
    found = (_agreement("TTFT", real, runs, lambda one: one.ttft_s), _agreement("TPOT", real, runs, lambda one: one.tpot_s))
    return [one for one in found if one is not None]


def _agreement(
    figure: str, real: Sequence[Served], runs: Sequence[Sequence[Served]], value: Callable[[Served], float | None]
) -> Agreement | None:
    rows = [tuple(map(value, row)) for row in zip(real, *runs, strict=True)]
    known = [tuple(v for v in row if v is not None) for row in rows if None not in row and row[0] != 0]
    if not known:
        return None
    truth, *simulated = zip(*known, strict=True)
    expected = [statistics.median(row[1:]) for row in known]
    errors = _errors(truth, expected)
    between = [statistics.median(_errors(one, other)) for one, other in itertools.pairwise(simulated)]
    return Agreement(
        figure,
        real_s=statistics.median(truth),
        simulated_s=statistics.median(itertools.chain(*simulated)),
        median_error=statistics.median(errors),
        p90_error=percentile(errors, 90),
        median_error_of_one=statistics.fmean(statistics.median(_errors(truth, one)) for one in simulated),
        median_between=statistics.fmean(between) if between else None,
    )


def _errors(truth: Sequence[float], other: Sequence[float]) -> list[float]:
    return [abs(b - a) / a for a, b in zip(truth, other, strict=True)]
