"""Options by which flags go on to a service as they are: whatever it can be told, without an option here for each.

Knows how a shell splits words. Does not know any service's flags.
"""

import shlex
from collections.abc import Sequence
from typing import Annotated

import typer

from common.errors import StartupError

ExecutorArgs = Annotated[
    list[str] | None,
    typer.Option("--executor-args", metavar="FLAGS", help='More flags of each executor: "--kv-dtype fp8_e4m3 --block-size 32".'),
]
StoreArgs = Annotated[
    list[str] | None, typer.Option("--store-args", metavar="FLAGS", help='More flags of the block store: "--redis-ttl-s 3600".')
]
SchedulerArgs = Annotated[
    list[str] | None, typer.Option("--scheduler-args", metavar="FLAGS", help='More flags of the scheduler: "--policy fcfs".')
]


def split_args(option: str, texts: Sequence[str] | None) -> tuple[str, ...]:
    """The words of all texts, quoted as in a shell.

    Args:
        option: where they come from, for the error.
        texts: one for each time that the option was given.

    Raises:
        StartupError: a quotation does not end.
    """
    try:
        return tuple(word for text in texts or () for word in shlex.split(text))
    except ValueError as error:
        raise StartupError(f"{option}: {error}") from error
