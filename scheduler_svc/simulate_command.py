"""python -m scheduler_svc.simulate_command: a trace or a recording through the production scheduler in virtual time.

`octavo simulate` calls it. A recording brings its own arrivals, policy and times of steps, and is compared with what comes out.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
from scheduler_svc.simulation.report import Report
from scheduler_svc.simulation.run import Simulation
from scheduler_svc.simulation.tables import Rows, failures_of, group_rows, rows_of

_RECORDING = ".octrec"
_COMPARED_RUNS = 5


@dataclass(frozen=True)
class _Workload:
    """What is simulated.

    Attributes:
        arrivals: who comes.
        recorded: what the same requests saw; empty: nobody knows, or not all of them come as they did.
        policy: of the recording; "fair" of others.
    """

    arrivals: Sequence[Arrival]
    recorded: Sequence[Served] = ()
    policy: str = "fair"


def main(words: Sequence[str] | None = None) -> int:
    """Simulates and reports; words are those of the command line."""
    arguments = _parser().parse_args(words)
    out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        _run(arguments, out, err)
    except (StartupError, OSError) as error:
        err.print(f"error: {error}", style="bold red", markup=False)
        return 2
    return 0


def _run(arguments: argparse.Namespace, out: Console, err: Console) -> None:
    for file in filter(None, (arguments.html, arguments.save_profile)):
        if not file.absolute().parent.is_dir():
            raise StartupError(f"{file}: there is no folder {file.absolute().parent}")
    run = RecordedRun.read(arguments.trace) if arguments.trace.suffix == _RECORDING else None
    profile = _profile(arguments.device, run, arguments.trace).with_blocks(arguments.num_blocks)
    if arguments.save_profile is not None:
        arguments.save_profile.write_text(profile.to_json())
    workload = _workload(run, arguments, profile, err)
    policies = list(dict.fromkeys(arguments.policy or [workload.policy]))
    runs = {policy: _simulate(workload, profile, policy, arguments, err) for policy in policies}
    outcomes = [outcomes[0] for outcomes in runs.values()]
    _say(outcomes, out)
    if workload.recorded and workload.policy in runs:
        for agreement in compare(workload.recorded, [outcome.served for outcome in runs[workload.policy]]):
            out.print(str(agreement))
    if arguments.html is not None:
        title = f"{arguments.trace.name} on {arguments.executors} x {profile.name}"
        Report(title, _about(workload, profile, arguments), outcomes, workload.recorded).write(arguments.html)
        out.print(f"plots: {arguments.html}")


def _simulate(
    workload: _Workload, profile: DeviceProfile, policy: str, arguments: argparse.Namespace, console: Console
) -> list[Outcome]:
    """One run; several with other seeds where there is something to compare them with."""
    num_runs = 1 if not workload.recorded or policy != workload.policy else arguments.runs
    num_requests = len(workload.arrivals)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(policy, total=num_runs * num_requests)
        outcomes = []
        for number in range(num_runs):

            def note(num_ended: int, before: int = number * num_requests) -> None:
                progress.update(task, completed=before + num_ended)

            simulation = Simulation(
                workload.arrivals, profile, arguments.executors, policy, seed=arguments.seed + number, on_progress=note
            )
            outcomes.append(simulation.run())
    return outcomes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="Azure .csv, Mooncake .jsonl, or a recording's .octrec file")
    parser.add_argument(
        "--policy",
        action="append",
        choices=sorted(POLICIES),
        help="several times: side by side; default: the recording's, or fair",
    )
    parser.add_argument("--executors", type=_positive, default=1, help="how many")
    parser.add_argument("--rate", type=_rate, help="scale arrivals to so many requests a second; bursts stay")
    parser.add_argument("--first", type=int, default=0, help="request of the trace that comes first, from 0")
    parser.add_argument("--requests", type=_positive, help="how many requests; default: all")
    parser.add_argument(
        "--device",
        default="",
        help=f"{', '.join(PROFILES)}, a file of --save-profile, or a recording whose steps are learned from; "
        "default: the recording itself, or the first",
    )
    parser.add_argument("--num-blocks", type=_positive, help="KV blocks of each executor")
    parser.add_argument("--tenants", default="", help="names that requests get in turn, for example big,big,big,small")
    parser.add_argument("--classes", default="", help="service classes that requests get in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the times of steps")
    parser.add_argument(
        "--runs",
        type=_positive,
        default=_COMPARED_RUNS,
        help=f"with other seeds, to compare a recording with; default {_COMPARED_RUNS}",
    )
    parser.add_argument("--html", type=Path, help="file for the plots")
    parser.add_argument("--save-profile", type=Path, help="file for what was learned of the device")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} requests a second are no rate")
    return value


def _profile(device: str, run: RecordedRun | None, trace: Path) -> DeviceProfile:
    if device in PROFILES:
        return PROFILES[device]
    if device:
        path = Path(device)
        if not path.exists():
            raise StartupError(f"--device {device}: neither one of {', '.join(PROFILES)} nor a file")
        return learn_profile(RecordedRun.read(path), path.stem) if path.suffix == _RECORDING else DeviceProfile.read(path)
    return next(iter(PROFILES.values())) if run is None else learn_profile(run, run.start.model or trace.stem)


def _workload(run: RecordedRun | None, arguments: argparse.Namespace, profile: DeviceProfile, err: Console) -> _Workload:
    every = traces.read_arrivals(arguments.trace) if run is None else run.arrivals
    max_tokens = profile.num_blocks * profile.block_size
    if arguments.first < 0 or arguments.first >= len(every):
        raise StartupError(f"--first {arguments.first}: the trace has requests from 0 to {len(every) - 1}")
    part = traces.part_of(every, arguments.first, arguments.requests, max_tokens)
    if not part:
        raise StartupError(f"no request from --first {arguments.first} on fits the {max_tokens} tokens of the device's blocks")
    num_too_long = sum(one.num_prompt_tokens + one.num_output_tokens > max_tokens for one in every[arguments.first :])
    if num_too_long:
        err.print(
            f"{num_too_long} requests of the trace are longer than the {max_tokens} tokens of the device's blocks: left out"
        )
    is_whole = len(part) == len(every) and arguments.rate is None and arguments.executors == 1
    if arguments.rate is not None:
        part = traces.at_rate(part, arguments.rate)
    if arguments.tenants or arguments.classes:
        part = list(traces.assign(part, arguments.tenants.split(","), _classes(arguments.classes)))
        is_whole = False
    if run is None:
        return _Workload(part)
    if not is_whole:
        err.print("not compared with the recording: its requests come otherwise here")
    return _Workload(part, run.served if is_whole else (), run.start.policy)


def _classes(names: str) -> list[ServiceClass]:
    try:
        return [ServiceClass[name.upper()] for name in (names or "standard").split(",")]
    except KeyError as error:
        raise StartupError(f"--classes: {error} is none of {', '.join(one.name.lower() for one in ServiceClass)}") from error


def _about(workload: _Workload, profile: DeviceProfile, arguments: argparse.Namespace) -> str:
    arrivals = workload.arrivals
    num_prompt, num_output = sum(one.num_prompt_tokens for one in arrivals), sum(one.num_output_tokens for one in arrivals)
    rate = f"{len(arrivals) / arrivals[-1].at_s:.2f} requests a second" if arrivals[-1].at_s else "all at once"
    return (
        f"{len(arrivals)} requests, {rate}, {num_prompt / len(arrivals):.0f} prompt and {num_output / len(arrivals):.0f} output "
        f"tokens on average. {arguments.executors} executors of the profile {profile.name}, {profile.num_blocks} blocks of "
        f"{profile.block_size} tokens each, at most {profile.max_num_seqs} sequences and {profile.max_num_batched_tokens} tokens "
        f"a step. Seed {arguments.seed}. Production scheduler in virtual time; clients and the network to them are not simulated."
    )


def _say(outcomes: list[Outcome], out: Console) -> None:
    _print_table(rows_of(outcomes), out)
    groups = group_rows(outcomes)
    if len(groups) > 1 + len(outcomes):
        _print_table(groups, out)
    for outcome in outcomes:
        steps_per_s = outcome.num_steps / max(outcome.took_s, 1e-9)
        out.print(
            f"{outcome.policy}: {outcome.num_steps} steps in {outcome.took_s:.1f} s, {steps_per_s:.0f} steps/s", style="dim"
        )
        for reason, num_failed in failures_of(outcome).items():
            out.print(f"{outcome.policy}: {num_failed} requests failed with {reason}")


def _print_table(rows: Rows, out: Console) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        out.print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # executors that end with their simulation are no news
    sys.exit(main())
