"""`octavo models`: what a server can be asked for."""

import dataclasses
import json
from typing import Annotated

import typer
from rich.table import Table

from octavo.cli.connection import Target, TlsCa, Token, connect
from octavo.cli.console import out
from octavo.client import DEFAULT_TARGET


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    target: Target = DEFAULT_TARGET,
    token: Token = "",
    tls_ca: TlsCa = None,
) -> None:
    """List the models of a server."""
    with connect(target, token, tls_ca, timeout_s=30.0) as client:
        found = client.models()
    if as_json:
        out.print(json.dumps([dataclasses.asdict(model) for model in found]), markup=False)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("model", "state", "context", "dtype", "executors", "chat"):
        table.add_column(column)
    for model in found:
        state = "[green]ready[/green]" if model.ready else "[red]no executor[/red]"
        chat = "yes" if model.has_chat_template else "no"
        table.add_row(model.name, state, f"{model.max_context_tokens:,}", model.dtype, str(model.num_executors), chat)
    out.print(table)
