"""python -m scheduler_svc.simulate_command: a trace or a recording through the production scheduler in virtual time.

`octavo simulate` calls it. A recording brings its own arrivals and the times of its steps, and is compared with what comes out.
"""

import argparse
import logging
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from common.errors import StartupError
from scheduler_svc.core.policies.choice import POLICIES
from scheduler_svc.core.request import ServiceClass
from scheduler_svc.simulation import arrivals as traces
from scheduler_svc.simulation.arrivals import Arrival
from scheduler_svc.simulation.comparison import compare
from scheduler_svc.simulation.learn import learn_profile
from scheduler_svc.simulation.outcome import Outcome, Served
from scheduler_svc.simulation.profile import PROFILES, DeviceProfile
from scheduler_svc.simulation.recorded import RecordedRun
from scheduler_svc.simulation.report import rows_of, write_report
from scheduler_svc.simulation.run import Simulation

_RECORDING = ".octrec"


def main() -> int:
    """Simulates and reports."""
    arguments = _parser().parse_args()
    logging.disable(logging.WARNING)  # executors that end with their simulation are no news
    out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        served, learned = _read(arguments.trace)
        profile = _profile(arguments.device, learned).with_blocks(arguments.num_blocks)
        if arguments.save_profile is not None:
            arguments.save_profile.write_text(profile.to_json())
        chosen = _chosen([one.arrival for one in served], arguments, profile)
        outcomes = [_simulate(chosen, profile, policy, arguments, err) for policy in arguments.policy or ["fair"]]
    except (StartupError, OSError) as error:
        err.print(f"error: {error}", style="bold red")
        return 2
    _say(outcomes, out)
    if learned is not None and len(chosen) == len(served) and arguments.rate is None:
        for agreement in compare(served, outcomes[0].served):
            out.print(
                f"{agreement.figure}: recorded {1e3 * agreement.real_s:.1f} ms, simulated {1e3 * agreement.simulated_s:.1f} ms "
                f"(medians); median error of a request {100 * agreement.median_error:.1f} %"
            )
    if arguments.html is not None:
        write_report(arguments.html, f"{arguments.trace.name} on {arguments.executors} x {profile.name}", outcomes)
        out.print(f"plots: {arguments.html}")
    return 0


def _simulate(
    arrivals: list[Arrival], profile: DeviceProfile, policy: str, arguments: argparse.Namespace, console: Console
) -> Outcome:
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(policy, total=len(arrivals))

        def note(num_ended: int) -> None:
            progress.update(task, completed=num_ended)

        return Simulation(arrivals, profile, arguments.executors, policy, seed=arguments.seed, on_progress=note).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="Azure .csv, Mooncake .jsonl, or a recording's .octrec file")
    parser.add_argument("--policy", action="append", choices=sorted(POLICIES), help="may be given several times; default fair")
    parser.add_argument("--executors", type=int, default=1, help="how many")
    parser.add_argument("--rate", type=float, help="scale arrivals to so many requests a second; bursts stay")
    parser.add_argument("--first", type=int, default=0, help="request of the trace that comes first")
    parser.add_argument("--requests", type=int, help="how many requests; default: all")
    parser.add_argument(
        "--device",
        default="",
        help=f"{', '.join(PROFILES)}, a file of --save-profile, or a recording; default: of the trace, or the first",
    )
    parser.add_argument("--num-blocks", type=int, help="KV blocks of each executor")
    parser.add_argument("--tenants", default="", help="names that requests get in turn, for example big,big,big,small")
    parser.add_argument("--classes", default="", help="service classes that requests get in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the times of steps")
    parser.add_argument("--html", type=Path, help="file for the plots")
    parser.add_argument("--save-profile", type=Path, help="file for what was learned of the device")
    return parser


def _read(trace: Path) -> tuple[list[Served], DeviceProfile | None]:
    """Requests of a trace; of a recording also what they saw, and its device."""
    if trace.suffix != _RECORDING:
        return [Served(arrival) for arrival in traces.read_arrivals(trace)], None
    run = RecordedRun.read(trace)
    return run.served, learn_profile(run, run.start.model or trace.stem)


def _profile(device: str, learned: DeviceProfile | None) -> DeviceProfile:
    if device in PROFILES:
        return PROFILES[device]
    if device:
        path = Path(device)
        return learn_profile(RecordedRun.read(path), path.stem) if path.suffix == _RECORDING else DeviceProfile.read(path)
    return learned or next(iter(PROFILES.values()))


def _chosen(arrivals: list[Arrival], arguments: argparse.Namespace, profile: DeviceProfile) -> list[Arrival]:
    part = traces.part_of(arrivals, arguments.first, arguments.requests, profile.num_blocks * profile.block_size)
    if not part:
        raise StartupError(f"--first {arguments.first}: no request of the trace is left that fits the device")
    if arguments.rate is not None:
        part = traces.at_rate(part, arguments.rate)
    if not arguments.tenants and not arguments.classes:
        return part
    try:
        classes = [ServiceClass[name.upper()] for name in (arguments.classes or "standard").split(",")]
    except KeyError as error:
        raise StartupError(f"--classes: {error} is none of {', '.join(one.name.lower() for one in ServiceClass)}") from error
    return list(traces.assign(part, arguments.tenants.split(","), classes))


def _say(outcomes: list[Outcome], out: Console) -> None:
    rows = rows_of(outcomes)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        out.print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    for outcome in outcomes:
        steps_per_s = outcome.num_steps / max(outcome.took_s, 1e-9)
        out.print(
            f"{outcome.policy}: {outcome.num_steps} steps in {outcome.took_s:.1f} s, {steps_per_s:.0f} steps/s", style="dim"
        )


if __name__ == "__main__":
    sys.exit(main())
