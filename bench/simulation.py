"""How far simulated runs are from real ones, on runs that the simulation has not learned from.

    python -m bench.simulation [--rates 1,2.5,4] [--seconds 40] [--model smollm2-135m-instruct] [--folder FOLDER]

For each rate (requests a second, Poisson) three runs of real processes on this machine's CPU are recorded: two with the same
arrivals and one with others; 32 to 256 prompt tokens, 16 to 48 output tokens. Then:

    real again   the two runs with the same arrivals against each other: how alike reality is to itself
    simulated    the steps of one of those are learned, the arrivals of the third are simulated and compared with what it saw

Errors are shares of the real value, by request. Of one: a single simulated run. Median, p90: of the median of all simulated runs.
With --folder recordings stay there, and those that are there are not made again.
"""

import argparse
import logging
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.clients import running_clients
from bench.workloads import WorkItem
from scheduler_svc.simulation.comparison import Agreement, compare
from scheduler_svc.simulation.learn import learn_profile
from scheduler_svc.simulation.recorded import RecordedRun
from scheduler_svc.simulation.run import Simulation
from tests.e2e.stack import StackConfig, running_stack

_NUM_RUNS = 9
_TIMEOUT_S = 300.0
_WARM_UP = [5] * 40


def arrivals(rate: float, seconds: float, seed: int) -> list[WorkItem]:
    """Poisson arrivals for so many seconds."""
    rng = random.Random(seed)
    items, at_s = [], 0.0
    while at_s < seconds:
        prompt = tuple(rng.randrange(10, 30_000) for _ in range(rng.randint(32, 256)))
        items.append(WorkItem(prompt, rng.randint(16, 48), at_s))
        at_s += rng.expovariate(rate)
    return items


def record(folder: Path, model: Path, items: Sequence[WorkItem]) -> None:
    """One run of real processes; the executor has one thread, clients and scheduler the rest of the machine."""
    config = StackConfig(model, scheduler_flags=("--record", str(folder)), with_store=False, num_threads=1)
    with running_stack(config) as stack, running_clients(1) as clients:
        stack.ask(_WARM_UP, 4)
        clients.run(stack.target, items, _TIMEOUT_S)


def read(folder: Path) -> RecordedRun:
    """The run, without the question that warmed it up."""
    run = RecordedRun.read(next(folder.glob("*.0000.octrec")))
    run.served = run.served[1:]
    return run


def measure(folder: Path, model: Path, rate: float, seconds: float) -> tuple[list[Agreement], list[Agreement]]:
    """Reality against itself, and a simulation against reality."""
    runs = []
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        place = folder / f"{rate:g}-{name}"
        if not place.exists():
            record(place, model, arrivals(rate, seconds, seed))
        runs.append(read(place))
    one, again, other = runs
    profile = learn_profile(one, "learned")
    simulated = [Simulation(other.arrivals, profile, seed=seed).run().served for seed in range(_NUM_RUNS)]
    return compare(one.served, [again.served]), compare(other.served, simulated)


def main() -> int:
    """Records, simulates and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1,2.5,4")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each run")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # executors that end with their simulation are no news
    from executor_svc.model.prepare import prepare_model
    from executor_svc.settings import default_cache_dir

    model = prepare_model(options.model, default_cache_dir(), lambda text: print(text, file=sys.stderr))
    print("rate  figure  real ms (again)  apart  real again: median  p90   simulated ms  apart  of one  median   p90", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for rate in map(float, options.rates.split(",")):
            for real, simulated in zip(*measure(options.folder or Path(temporary), model, rate, options.seconds), strict=True):
                print(_row(rate, real, simulated), flush=True)
    return 0


def _row(rate: float, real: Agreement, simulated: Agreement) -> str:
    again = f"{1e3 * real.real_s:7.1f} ({1e3 * real.simulated_s:5.1f})  {real.error_of_median:5.1%}"
    alike = f"{real.median_error:18.1%}  {real.p90_error:5.1%}"
    found = f"{1e3 * simulated.simulated_s:5.1f} of {1e3 * simulated.real_s:5.1f}  {simulated.error_of_median:5.1%}"
    errors = f"{simulated.median_error_of_one:6.1%}  {simulated.median_error:6.1%}  {simulated.p90_error:5.1%}"
    return f"{rate:4g}  {real.figure:6}  {again}  {alike}  {found}  {errors}"


if __name__ == "__main__":
    sys.exit(main())
