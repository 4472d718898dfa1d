"""`octavo executors`: which executors a server has, and how they join and leave while it serves."""

import dataclasses
import json
import time
from typing import Annotated

import typer
from rich.table import Table

from octavo.cli.connection import Target, TlsCa, Token, connect
from octavo.cli.console import out, say
from octavo.client import DEFAULT_TARGET, OctavoClient
from octavo.load import ExecutorStatus

_LOOK_INTERVAL_S = 0.2

executors = typer.Typer(no_args_is_help=True, help="List the executors of a server; let them join and leave.")

ExecutorAddress = Annotated[str, typer.Argument(metavar="ADDRESS", help="Of an executor: host:port or unix:/path.")]
Wait = Annotated[float, typer.Option("--wait", help="Seconds to wait for it.")]


@executors.command("list")
def list_executors(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    target: Target = DEFAULT_TARGET,
    token: Token = "",
    tls_ca: TlsCa = None,
) -> None:
    """List executors: state, requests, device."""
    with connect(target, token, tls_ca, timeout_s=30.0) as client:
        found = client.server_info().executors
    if as_json:
        out.print(json.dumps([dataclasses.asdict(executor) for executor in found]), markup=False)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("address", "name", "state", "requests", "blocks", "backend", "model"):
        table.add_column(column, justify="right" if column in ("requests", "blocks") else "left")
    for executor in found:
        table.add_row(
            executor.address, executor.executor_id, _state(executor), str(executor.num_requests), f"{executor.num_blocks:,}",
            executor.backend, executor.model,
        )  # fmt: skip
    out.print(table)


@executors.command()
def add(
    address: ExecutorAddress,
    wait_s: Wait = 60.0,
    target: Target = DEFAULT_TARGET,
    token: Token = "",
    tls_ca: TlsCa = None,
) -> None:
    """Let an executor join, and wait until it is connected. Until the server's next start."""
    with connect(target, token, tls_ca, timeout_s=30.0) as client:
        status = client.add_executor(address)
        deadline_s = time.monotonic() + wait_s
        while not status.connected and time.monotonic() < deadline_s:
            time.sleep(_LOOK_INTERVAL_S)
            status = _find(client, status.address) or status
    if not status.connected:
        say(f"{status.address} has joined and is not connected: {status.problem}")
        raise typer.Exit(1)
    say(f"{status.address} has joined: {status.executor_id}, {status.num_blocks:,} blocks")


@executors.command()
def remove(
    address: ExecutorAddress,
    drain_s: Annotated[float, typer.Option("--drain", help="Seconds that its running requests get.")] = 30.0,
    wait_s: Wait = 60.0,
    target: Target = DEFAULT_TARGET,
    token: Token = "",
    tls_ca: TlsCa = None,
) -> None:
    """Let an executor leave, and wait until it has. Its process goes on; end it then."""
    with connect(target, token, tls_ca, timeout_s=30.0) as client:
        status: ExecutorStatus | None = client.remove_executor(address, drain_s=drain_s)
        deadline_s = time.monotonic() + wait_s
        while (status := _find(client, address)) is not None and time.monotonic() < deadline_s:
            time.sleep(_LOOK_INTERVAL_S)
    if status is not None:
        say(f"{address} is about to leave: {status.num_requests} requests are left")
        raise typer.Exit(1)
    say(f"{address} has left")


def _find(client: OctavoClient, address: str) -> ExecutorStatus | None:
    return next((executor for executor in client.server_info().executors if executor.address == address), None)


def _state(executor: ExecutorStatus) -> str:
    if executor.leaving:
        return "[yellow]leaving[/yellow]"
    return "[green]connected[/green]" if executor.connected else f"[red]{executor.problem}[/red]"
