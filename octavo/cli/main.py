"""The command line as a whole: commands, `--version`, and how errors look. Knows no command's inside."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from octavo import __version__
from octavo.cli.chat import chat
from octavo.cli.console import say_error
from octavo.cli.demo import demo
from octavo.cli.doctor import doctor
from octavo.cli.executors import executors
from octavo.cli.generate import generate
from octavo.cli.inspect import inspect
from octavo.cli.kv import kv
from octavo.cli.models import models
from octavo.cli.replay import replay
from octavo.cli.simulate import SETTINGS, simulate
from octavo.cli.top import top
from octavo.cli.up import up
from octavo.errors import OctavoError, Unauthenticated, Unavailable

_HINTS = {
    Unavailable: "is a server running there? start one with: octavo up",
    Unauthenticated: "give it with --token or OCTAVO_TOKEN",
}


class Commands(TyperGroup):
    """All commands; an error of Octavo is one red line and exit code 2, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command."""
        try:
            return super().invoke(ctx)
        except OctavoError as error:
            hint = next((f" ({text})" for kind, text in _HINTS.items() if type(error) is kind), "")
            say_error(error.message + hint)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(name="octavo", cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def octavo(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """LLM serving with paged attention as three gRPC services."""


for command in (up, demo, chat, generate, models, top, doctor, inspect, replay):
    app.command()(command)
app.command(context_settings=SETTINGS)(simulate)
app.add_typer(kv, name="kv")
app.add_typer(executors, name="executors")


def main() -> None:
    """The console script `octavo`."""
    app()
