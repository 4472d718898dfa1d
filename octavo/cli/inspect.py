"""`octavo inspect`: what each rewrite of a model brings to a decode step on this machine. The executor's own process measures."""

import subprocess
import sys
from typing import Annotated

import typer

from octavo.cli.services import DEFAULT_MODEL


def inspect(
    model: Annotated[str, typer.Argument(help="Name, folder, .gguf file or hub id.")] = DEFAULT_MODEL,
    batch_sizes: Annotated[str, typer.Option("--batch", metavar="N,N,...", help="Sequences of a step.")] = "1,8,32",
    context: Annotated[int, typer.Option(min=1, help="Tokens that every sequence has already.")] = 1024,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    load_format: Annotated[str, typer.Option(help="random: weights of the config's shape, for benchmarks.")] = "auto",
    tune: Annotated[bool, typer.Option("--tune", help="First find the fastest configurations, and keep them. Minutes.")] = False,
) -> None:
    """Measure a decode step with each rewrite on and off: milliseconds and kernel launches. Needs a GPU."""
    command = inspection_command(model, batch_sizes, context, dtype, load_format) + ["--tune"] * tune
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def inspection_command(model: str, batch_sizes: str, context: int, dtype: str, load_format: str) -> list[str]:
    """The command line of the process that measures."""
    sizes = [word.strip() for word in batch_sizes.split(",")]
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise typer.BadParameter(f"{batch_sizes!r} is no list of numbers of sequences, such as 1,8,32", param_hint="--batch")
    command = [sys.executable, "-m", "executor_svc.step_inspection", "--model", model, "--context", str(context)]
    command += ["--dtype", dtype, "--load-format", load_format]
    return command + [word for size in sizes for word in ("--batch-sizes", size)]
