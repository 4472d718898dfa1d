"""`octavo replay`: the scheduler's core again on what a running one recorded. A process of the scheduler's own does it."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer


def replay(
    files: Annotated[list[Path], typer.Argument(help="A file of each recording, or a folder of recordings.")],
) -> None:
    """Run the scheduler's core again on recordings; say every decision that comes out another way.

    Exit code 0: none does; 1: some do; 2: a file cannot be read. `octavo up --record FOLDER` records.
    """
    command = [sys.executable, "-m", "scheduler_svc.replay_command", *map(str, files)]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
