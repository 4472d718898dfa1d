"""python -m scheduler_svc.replay_command FILE: runs the core again on a recording and says which decisions come out another way.

Exits 0 when none does, 1 when some do, 2 when the file cannot be read. `octavo replay` calls it.
"""

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from common.errors import StartupError
from scheduler_svc.core_maker import plain_scheduler
from scheduler_svc.recording.reader import RecordingFile
from scheduler_svc.recording.recorder import SOFTWARE
from scheduler_svc.recording.replay import Replay, ReplayFigures

_CALLS_PER_LOOK = 500


def replay(file: RecordingFile, progress: Progress) -> tuple[ReplayFigures, float]:
    """Runs a recording.

    Returns:
        What was seen, and the seconds that it took.

    Raises:
        StartupError: the file is damaged.
    """
    task = progress.add_task(file.header.executor, total=file.num_bytes)
    run = Replay(plain_scheduler)
    began_s = time.perf_counter()
    for number, call in enumerate(file.calls()):
        run.take(call)
        if number % _CALLS_PER_LOOK == 0:
            progress.update(task, completed=file.num_read_bytes)
    took_s = time.perf_counter() - began_s
    progress.update(task, completed=file.num_bytes)
    return run.end(), took_s


def say(figures: ReplayFigures, took_s: float, file: RecordingFile, console: Console) -> None:
    """A few lines about a replay."""
    console.print(
        f"{file.header.executor}: {figures.num_calls} calls, {figures.num_requests} requests, {figures.num_steps} steps, "
        f"{figures.num_preemptions} preemptions, {figures.num_cancelled} cancelled, {figures.num_losses} sessions lost; "
        f"{file.num_bytes / 1e6:.2f} MB in {len(file.segments)} files, by {file.header.software}"
    )
    if file.has_other_fields:
        console.print(f"{file.header.software} wrote it with other fields than {SOFTWARE} knows: differences may come from those")
    if figures.over is None:
        console.print("the recording was cut off: its writer did not end in good order")
    elif figures.over:
        console.print(f"the recording ended before its scheduler did: {figures.over}")
    for one in figures.differences:
        console.print(f"  call {one.number}, after step {one.step_id}: {one.what}: {one.detail}")
    if figures.num_differences > len(figures.differences):
        console.print(f"  and {figures.num_differences - len(figures.differences)} more")
    console.print(
        f"{figures.num_differences} different decisions of {figures.num_decisions}, "
        f"{figures.num_steps / max(took_s, 1e-9):.0f} steps/s, {took_s:.2f} s"
    )


def main() -> int:
    """Replays every recording that is named."""
    parser = argparse.ArgumentParser(prog="octavo replay", description="Run the scheduler's core again on a recording.")
    parser.add_argument("files", type=Path, nargs="+", help="a file of each recording, or a folder of recordings")
    arguments = parser.parse_args()
    out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    num_differences = 0
    try:
        for path in recordings_in(arguments.files):
            file = RecordingFile.of(path)
            with Progress(console=err, transient=True) as progress:
                figures, took_s = replay(file, progress)
            say(figures, took_s, file, out)
            num_differences += figures.num_differences
    except StartupError as error:
        err.print(f"error: {error.message}", style="bold red")
        return 2
    return 1 if num_differences else 0


def recordings_in(paths: list[Path]) -> list[Path]:
    """The files that are named, and the first file of every recording in the folders that are.

    Raises:
        StartupError: a folder has none.
    """
    found = []
    for path in paths:
        inside = sorted(path.glob("*.0000.octrec")) if path.is_dir() else [path]
        if not inside:
            raise StartupError(f"{path}: no recordings here")
        found += inside
    return found


if __name__ == "__main__":
    sys.exit(main())
