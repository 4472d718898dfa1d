"""Where the command line writes: answers to standard output, everything about them to standard error. Plain when piped."""

import re
import sys

from rich.console import Console
from rich.text import Text

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue")


def write(text: str) -> None:
    """Writes a piece of an answer as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say(text: str, style: str = "dim") -> None:
    """Writes one line about what is going on."""
    err.print(Text(text, style=style))


def say_error(message: str) -> None:
    """Writes the one red line of a failure."""
    err.print(Text(f"error: {message}", style="bold red"))


def log_message(line: str) -> str | None:
    """The message of an entry of level INFO in the log format of common/logs.py; None for any other line."""
    match = re.fullmatch(r"[\d:.]+ \S+ +INFO +(.*)", line)
    return match[1] if match else None


class LogPrinter:
    """Writes the output of several processes as one stream, each line with its process in front, in a colour of its own."""

    def __init__(self) -> None:
        self._colours: dict[str, str] = {}

    def __call__(self, name: str, line: str) -> None:
        """One line of one process."""
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        err.print(Text.assemble((f"{name:<11}│ ", colour), Text.from_ansi(line)))
