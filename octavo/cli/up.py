"""`octavo up`: all processes of a server in one terminal. Knows options and what to print; server.py does the work."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.panel import Panel
from rich.text import Text

from common.state_folder import kv_folder
from octavo.cli.console import LogPrinter, err, say
from octavo.cli.server import run_until_stopped, running_server
from octavo.cli.service_args import ExecutorArgs, SchedulerArgs, StoreArgs, split_args
from octavo.cli.services import DEFAULT_MODEL, StackOptions
from octavo.cli.sizes import parse_bytes
from octavo.client import DEFAULT_TARGET


def up(
    model: Annotated[str, typer.Option(help="Name, folder, .gguf file or hub id.")] = DEFAULT_MODEL,
    model_name: Annotated[str, typer.Option(help='Public name, "models/...".')] = "",
    executors: Annotated[int, typer.Option(min=1, max=64, help="Executor processes.")] = 1,
    listen: Annotated[str, typer.Option(help="Public API: host:port or unix:/path.")] = DEFAULT_TARGET,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    quantization: Annotated[str | None, typer.Option(help="none or int8.")] = None,
    load_format: Annotated[str | None, typer.Option(help="auto, or random for benchmarks.")] = None,
    kv_blocks: Annotated[int | None, typer.Option(min=1, help="KV blocks of each executor.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV memory of each executor, for example 2GiB.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest sequence in tokens.")] = None,
    store_capacity: Annotated[str | None, typer.Option(help="Shared memory of the block store, for example 1GiB.")] = None,
    disk_dir: Annotated[
        Path | None, typer.Option(help="Where the block store keeps blocks on disk.", show_default="below ~/.local/state/octavo")
    ] = None,
    disk_capacity: Annotated[
        str | None, typer.Option(help="Room there, for example 64GiB; 0: none.", show_default="64GiB, or half of what is free")
    ] = None,
    redis_url: Annotated[
        str, typer.Option(envvar="OCTAVO_KVSTORE_REDIS_URL", help="Redis or Valkey below the block store.", show_default=False)
    ] = "",
    no_store: Annotated[bool, typer.Option("--no-store", help="Without a block store.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads of each executor.")] = None,
    token: Annotated[str, typer.Option(envvar="OCTAVO_TOKEN", help="Callers must send it.", show_default=False)] = "",
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate of the public API.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of --tls-cert.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve other hosts without TLS and token.")] = False,
    record: Annotated[
        Path | None, typer.Option(help="Folder for recordings of the scheduler's decisions, for octavo replay.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    executor_args: ExecutorArgs = None,
    store_args: StoreArgs = None,
    scheduler_args: SchedulerArgs = None,
) -> None:
    """Start a server: block store, executors and scheduler, one log. Ctrl-C stops it.

    Every other setting of a service: --executor-args, --store-args or --scheduler-args, with flags as the service itself takes
    them (python -m executor_svc --help), or its environment variable, for example OCTAVO_SCHEDULER_MAX_WAITING_REQUESTS.
    """
    options = StackOptions(
        model=model,
        model_name=model_name,
        listen=listen,
        num_executors=executors,
        dtype=dtype,
        quantization=quantization,
        load_format=load_format,
        kv_blocks=kv_blocks,
        kv_memory_bytes=None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory"),
        max_model_len=max_model_len,
        with_store=not no_store,
        store_capacity_bytes=None if store_capacity is None else parse_bytes(store_capacity, "--store-capacity"),
        disk_dir=disk_dir or kv_folder(listen),
        disk_capacity_bytes=None if disk_capacity is None else parse_bytes(disk_capacity, "--disk-capacity"),
        redis_url=redis_url,
        threads=threads,
        token=token,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        record=record,
        log_level=log_level,
        executor_args=split_args("--executor-args", executor_args),
        store_args=split_args("--store-args", store_args),
        scheduler_args=split_args("--scheduler-args", scheduler_args),
    )
    if not run_until_stopped(_serve(options)):
        say("stopped")


async def _serve(options: StackOptions) -> None:
    async with running_server(options, LogPrinter(), say) as (stack, target):
        ready = _ready(target, options)
        err.print(Panel(ready, expand=False, border_style="green") if err.is_terminal else ready)
        await asyncio.ensure_future(stack.watch())


def _ready(target: str, options: StackOptions) -> Text:
    flags = "" if target == DEFAULT_TARGET else f" --target {target}"
    secret = " --token ..." if options.token else ""
    return Text.assemble(
        ("Octavo serves ", "bold"), (options.model, "bold green"), (" on ", "bold"), (target, "bold green"), "\n\n",
        f'octavo generate{flags}{secret} "The capital of France is"\n',
        f"octavo chat{flags}{secret}\n",
        f"octavo top{flags}{secret}\n\n",
        ("Ctrl-C stops it.", "dim"),
    )  # fmt: skip
