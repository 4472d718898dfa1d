"""Rolling back-test of the load forecast on public traces, beside the last value, the mean and exponential smoothing.

    python -m bench.forecast FOLDER [--warm-up 600]

FOLDER has azure_llm_2023_conv.csv, azure_llm_2023_code.csv and mooncake_conversation.jsonl; files that are missing are left out.

Every second each forecaster says how much comes in the next 10 s and in the next 60 s, knowing the seconds before alone. Nothing
is fitted to one part of a trace and tested on another: the production code runs as it is. Errors are shares of the mean outcome:

    last, mean        mean absolute error after the warm-up, as of all others
    chosen            of smoothing with the half-life that was the best in the warm-up, as somebody could have it who serves
    hindsight         of smoothing with the half-life that was the best after it, as nobody can
    floor             mean absolute error of who knows the true rate, if requests of these sizes came at random (Poisson)
    median            mean absolute error of the forecast's median, as if it were a number
    error             of the forecast, a distribution: continuous ranked probability score, for a number the absolute error
    lower (chosen)    how much lower error and median are than the best of last, mean and chosen
    lower (hindsight) how much lower they are than the best of last, mean and hindsight
    (spread)          the score of smoothing in hindsight with our spread around it: what is left for the choice of the level
    in 80 %           how often the outcome lay between the quantiles 0.1 and 0.9

Output tokens come when their request ends, 30 ms a token after its arrival.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from bench.forecast_rivals import rivals
from bench.traces import TRACE_FILES, TracedRequest, read_trace
from scheduler_svc.core.forecast.experts import Level
from scheduler_svc.core.forecast.forecast import Forecast
from scheduler_svc.core.forecast.horizon import HorizonForecast
from scheduler_svc.core.forecast.load_forecast import HORIZONS_S
from scheduler_svc.core.forecast.quantity import Quantity
from scheduler_svc.core.forecast.series import CountSeries

_TOKEN_S = 0.03
_SMOOTHING = "smoothing "


@dataclass(frozen=True)
class Row:
    """One quantity of one trace at one horizon; errors as shares of the mean outcome."""

    horizon_s: int
    quantity: Quantity
    last: float
    mean: float
    chosen: float
    chosen_half_life: str
    hindsight: float
    half_life: str
    floor: float
    median: float
    error: float
    spread: float
    coverage: float

    @property
    def best_chosen(self) -> float:
        """The lowest error of the others, when nobody knows the trace in advance."""
        return min(self.last, self.mean, self.chosen)

    @property
    def best_in_hindsight(self) -> float:
        """The lowest error of the others, with the half-life that suits the trace best."""
        return min(self.last, self.mean, self.hindsight)

    def __str__(self) -> str:
        others = (
            f"{self.last:6.3f} {self.mean:6.3f} {self.chosen:6.3f} ({self.chosen_half_life:>6}) "
            f"{self.hindsight:6.3f} ({self.half_life:>6}) {self.floor:6.3f}"
        )
        lower = " ".join(
            f"{1 - self.error / best:5.0%} {1 - self.median / best:+5.0%}" for best in (self.best_chosen, self.best_in_hindsight)
        )
        return (
            f"{self.horizon_s:3} s  {self.quantity.value:13}  {others}  {self.median:6.3f} {self.error:6.3f}  {lower}  "
            f"({self.spread:.3f}) {self.coverage:7.0%}"
        )


_HEAD = (
    "              of       last   mean  chosen          hindsight        floor  median  error  lower, median: "
    "chosen, hindsight  (spread)  in 80 %"
)


def counts_of(requests: Sequence[TracedRequest], quantity: Quantity) -> tuple[list[float], list[float]]:
    """Sums per second of a trace, and sums of squares; the last second, which is not whole, is left out."""
    num_seconds = int(requests[-1].arrival_s)
    sums, squares = [0.0] * num_seconds, [0.0] * num_seconds
    for request in requests:
        at_s, size = request.arrival_s, 1.0
        if quantity is Quantity.PROMPT_TOKENS:
            size = request.num_prompt_tokens
        elif quantity is Quantity.OUTPUT_TOKENS:
            at_s, size = at_s + _TOKEN_S * request.num_output_tokens, request.num_output_tokens
        if at_s < num_seconds:
            sums[int(at_s)] += size
            squares[int(at_s)] += size * size
    return sums, squares


def back_test(requests: Sequence[TracedRequest], quantity: Quantity, horizon_s: int, warm_up_s: int) -> Row:
    """Forecasts every second of a trace."""
    counts, squares = counts_of(requests, quantity)
    totals, square_totals = [0.0, *accumulate(counts)], [0.0, *accumulate(squares)]
    ends = range(warm_up_s, len(counts) - horizon_s + 1)
    outcomes = [totals[end + horizon_s] - totals[end] for end in ends]
    scale = sum(outcomes)
    series = CountSeries((horizon_s,))
    made = _made(series.horizons[horizon_s], series.note, counts, ends)
    errors, early_errors = {}, {}
    early_ends = range(1, warm_up_s - horizon_s + 1)  # whose outcomes were known when the warm-up was over
    for rival in rivals(counts, horizon_s):
        errors[rival.name] = sum(abs(rival.forecasts[end - 1] - y) for end, y in zip(ends, outcomes, strict=True)) / scale
        early_errors[rival.name] = sum(
            abs(rival.forecasts[end - 1] - totals[end + horizon_s] + totals[end]) for end in early_ends
        )
    smoothings = [name for name in errors if name.startswith(_SMOOTHING)]
    chosen, best = (min(smoothings, key=known.__getitem__) for known in (early_errors, errors))
    level = Level(float(best.removeprefix(_SMOOTHING).removesuffix(" s")))
    smoothed, totals_so_far = HorizonForecast(horizon_s, [level]), iter(totals[1:])

    def note(count: float) -> None:
        level.note(count)
        smoothed.advance(next(totals_so_far))

    spread = _made(smoothed, note, counts, ends)
    deviations = (math.sqrt(square_totals[end + horizon_s] - square_totals[end]) for end in ends)
    return Row(
        horizon_s,
        quantity,
        last=errors["last"],
        mean=errors["mean"],
        chosen=errors[chosen],
        chosen_half_life=chosen.removeprefix(_SMOOTHING),
        hindsight=errors[best],
        half_life=best.removeprefix(_SMOOTHING),
        floor=math.sqrt(2 / math.pi) * sum(deviations) / scale,
        median=sum(abs(f.median - y) for f, y in zip(made, outcomes, strict=True)) / scale,
        error=sum(f.error(y) for f, y in zip(made, outcomes, strict=True)) / scale,
        spread=sum(f.error(y) for f, y in zip(spread, outcomes, strict=True)) / scale,
        coverage=sum(f.quantile(0.1) <= y <= f.quantile(0.9) for f, y in zip(made, outcomes, strict=True)) / len(outcomes),
    )


def _made(horizon: HorizonForecast, note: Callable[[float], None], counts: Sequence[float], ends: range) -> list[Forecast]:
    """The forecasts that were the newest after each of these numbers of counts."""
    forecasts = []
    for count in counts:
        note(count)
        forecasts.append(horizon.newest)
    return [forecasts[end - 1] for end in ends]


def main() -> int:
    """Parses the options, tests and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the traces")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=600,
        help="seconds at the start of each that do not count, and in which half-lives are chosen",
    )
    arguments = parser.parse_args()
    paths = {name: arguments.folder / file for name, file in TRACE_FILES.items() if (arguments.folder / file).exists()}
    if not paths:
        print(f"{arguments.folder} has none of {', '.join(TRACE_FILES.values())}", file=sys.stderr)
        return 1
    for name, path in paths.items():
        requests = read_trace(path)
        print(f"{name}: {len(requests)} requests in {requests[-1].arrival_s:.0f} s\n{_HEAD}")
        for horizon_s in HORIZONS_S:
            for quantity in Quantity:
                print(back_test(requests, quantity, horizon_s, arguments.warm_up), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
