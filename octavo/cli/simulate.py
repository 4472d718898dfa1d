"""`octavo simulate`: a trace through the production scheduler in virtual time. A process of the scheduler's own does it."""

import subprocess
import sys

import typer

SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Of the command: all that it is given goes on as it is."""


def simulate(context: typer.Context) -> None:
    """Run a trace or a recording through the scheduler in virtual time; see octavo simulate --help."""
    command = [sys.executable, "-m", "scheduler_svc.simulate_command", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
