"""`octavo kv`: looks after the blocks of a block store. Knows options and what to print; the store does the work.

With a server that runs it talks to its store; without one it starts a store for the folder, and stops it again.
"""

import asyncio
import json
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import grpc.aio
import typer
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from common.errors import InvalidParameter
from common.rpc.status import from_rpc_error
from common.state_folder import kv_folder
from octavo.cli.connection import Target, connect
from octavo.cli.console import err, out, say
from octavo.cli.kv_chain import keys_of, token_ids_of
from octavo.cli.kv_connection import KvStore, block_store
from octavo.cli.kv_import import import_blocks
from octavo.cli.sizes import format_bytes
from octavo.client import DEFAULT_TARGET
from octavo.kv_archive import ArchivedBlock, ArchiveWriter, read_archive
from octavo.kvstore.v1 import kv_store_admin_service_pb2 as admin_pb
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from octavo.prompt import ChatMessage

kv = typer.Typer(no_args_is_help=True, help="List, verify, export, import and drop the blocks of a block store.")

Store = Annotated[str, typer.Option("--store", envvar="OCTAVO_KVSTORE", help="Block store: host:port or unix:/path.")]
DiskDir = Annotated[Path, typer.Option("--disk-dir", help="Folder of its disk tier, if no --store is given.")]
Token = Annotated[str, typer.Option("--token", envvar="OCTAVO_KVSTORE_TOKEN", help="Bearer token.", show_default=False)]
LayoutOption = Annotated[str, typer.Option("--layout", help="The beginning of a layout's fingerprint, see list.")]
DEFAULT_DISK_DIR = kv_folder(DEFAULT_TARGET)
ResultT = TypeVar("ResultT")


@kv.command("list")
def list_layouts(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    store: Store = "",
    disk_dir: DiskDir = DEFAULT_DISK_DIR,
    token: Token = "",
) -> None:
    """List layouts: blocks and bytes in each tier."""

    async def work() -> list[dict[str, Any]]:
        async with block_store(store, disk_dir, token) as found:
            return [_row(entry) for entry in await _layouts(found)]

    rows = _run(work())
    if as_json:
        out.print(json.dumps(rows), markup=False)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("layout", "tier", "blocks", "bytes", "block"):
        table.add_column(column, justify="left" if column in ("layout", "tier") else "right")
    for row in rows:
        sizes = format_bytes(row["num_blocks"] * row["block_bytes"]), format_bytes(row["block_bytes"])
        table.add_row(row["layout"][:16], row["tier"], f"{row['num_blocks']:,}", *sizes)
    out.print(table)


@kv.command()
def verify(layout: LayoutOption = "", store: Store = "", disk_dir: DiskDir = DEFAULT_DISK_DIR, token: Token = "") -> None:
    """Read every block on disk and drop those that are not what they were. Exit status 1: there were some."""

    async def work() -> admin_pb.VerifyBlocksResponse:
        async with block_store(store, disk_dir, token) as found:
            request = admin_pb.VerifyBlocksRequest(layout_fingerprint=await _fingerprint(found, layout))
            last = admin_pb.VerifyBlocksResponse()
            with _progress("verifying", MofNCompleteColumn()) as progress:
                task = progress.add_task("verifying", total=None)
                async for last in found.admin.VerifyBlocks(request, metadata=found.metadata):
                    progress.update(task, total=last.num_blocks, completed=last.num_checked)
            return last

    last = _run(work())
    out.print(f"{last.num_checked:,} blocks, {format_bytes(last.num_checked_bytes)}: {last.num_bad:,} bad ones dropped")
    if last.num_bad:
        raise typer.Exit(1)


@kv.command()
def export(
    file: Annotated[Path, typer.Argument(help="File to write.")],
    key: Annotated[list[str] | None, typer.Option("--key", metavar="HEX", help="A block's key; may be repeated.")] = None,
    prompt: Annotated[str, typer.Option("--prompt", help="The blocks of this text; the server at --target tokenises it.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Put --prompt through the model's chat template.")] = False,
    tokens: Annotated[str, typer.Option("--tokens", help="The blocks of these token ids, like 1,2,3.")] = "",
    block_size: Annotated[int, typer.Option("--block-size", min=1, help="Tokens per block, of a prompt.")] = 16,
    cache_salt: Annotated[str, typer.Option("--cache-salt", help="The salt of the requests that had this prompt.")] = "",
    server_salt: Annotated[
        str, typer.Option("--server-salt", envvar="OCTAVO_SCHEDULER_CACHE_SALT", help="The server's.", show_default=False)
    ] = "",
    target: Target = DEFAULT_TARGET,
    layout: LayoutOption = "",
    store: Store = "",
    disk_dir: DiskDir = DEFAULT_DISK_DIR,
    token: Token = "",
) -> None:
    """Write blocks into a file: all of them, those of a layout, of a prompt or of keys."""
    if file.exists():
        raise InvalidParameter("FILE", f"{file} exists already")
    if sum(map(bool, (prompt, tokens, key))) > 1:
        raise InvalidParameter("--prompt", "give one of --prompt, --tokens and --key")
    keys = [_key(text) for text in key or []]
    token_ids = _token_ids(prompt, chat, target) if prompt else token_ids_of(tokens) if tokens else []
    part = file.with_name(file.name + ".part")

    async def work() -> int:
        async with block_store(store, disk_dir, token) as found:
            fingerprint = await _fingerprint(found, layout)
            if token_ids:
                fingerprints = {fingerprint} if fingerprint else {e.layout.fingerprint for e in await _layouts(found)}
                salts = {"server_salt": server_salt, "cache_salt": cache_salt}
                keys.extend(keys_of(token_ids, fingerprints or {b""}, block_size=block_size, **salts))
            request = admin_pb.ExportBlocksRequest(keys=keys, layout_fingerprint=fingerprint)
            with part.open("wb") as output, _progress("exporting", MofNCompleteColumn()) as progress:
                writer = ArchiveWriter(output)
                task = progress.add_task("exporting", total=None)
                async for block, num_blocks in _exported(found.admin.ExportBlocks(request, metadata=found.metadata)):
                    writer.add(block)
                    progress.update(task, total=num_blocks, completed=writer.num_blocks)
                writer.finish()
            return writer.num_blocks

    try:
        num_blocks = _run(work())
        part.rename(file)
    except OSError as error:
        raise InvalidParameter("FILE", f"{file}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    out.print(f"{num_blocks:,} blocks, {format_bytes(file.stat().st_size)} in {file}")


@kv.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(help="What export wrote.")],
    store: Store = "",
    disk_dir: DiskDir = DEFAULT_DISK_DIR,
    token: Token = "",
) -> None:
    """Read blocks from a file; they are on disk when this ends. Exit status 1: some were wrong or found no room."""

    async def work() -> Any:
        async with block_store(store, disk_dir, token) as found:
            with file.open("rb") as data, _progress("importing", DownloadColumn()) as progress:
                task = progress.add_task("importing", total=file.stat().st_size)
                blocks = read_archive(data, "FILE")
                return await import_blocks(found, blocks, lambda num_bytes: progress.advance(task, num_bytes))

    try:
        result = _run(work())
    except OSError as error:
        raise InvalidParameter("FILE", f"{file}: {error.strerror}") from error
    out.print(
        f"{result.num_written:,} blocks, {result.num_durable:,} of them on disk;"
        f" {result.num_rejected:,} had wrong bytes, {result.num_refused:,} found no room"
    )
    if result.num_rejected or result.num_refused:
        raise typer.Exit(1)


@kv.command()
def drop(
    layout: LayoutOption = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    store: Store = "",
    disk_dir: DiskDir = DEFAULT_DISK_DIR,
    token: Token = "",
) -> None:
    """Drop every block that nobody holds, or those of a layout; in every tier."""
    what = f"every block of layout {layout}" if layout else "every block"
    if not yes and not typer.confirm(f"Drop {what}?", err=True):
        raise typer.Exit(1)

    async def work() -> pb.ClearBlocksResponse:
        async with block_store(store, disk_dir, token) as found:
            request = pb.ClearBlocksRequest(layout_fingerprint=await _fingerprint(found, layout))
            return await found.blocks.ClearBlocks(request, metadata=found.metadata)

    answer = _run(work())
    out.print(f"dropped; in shared memory {answer.num_dropped:,} blocks, {answer.num_kept:,} that are held stay")


def _run(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    try:
        return asyncio.run(work)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


@contextmanager
def _progress(text: str, column: Any) -> Any:
    columns = (TextColumn(text), BarColumn(), column, TimeRemainingColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        yield progress
    if not err.is_terminal:
        say(f"{text}: done")


async def _layouts(store: KvStore) -> list[admin_pb.LayoutStats]:
    answer = await store.admin.ListLayouts(admin_pb.ListLayoutsRequest(), metadata=store.metadata)
    return list(answer.layouts)


def _row(entry: admin_pb.LayoutStats) -> dict[str, Any]:
    return {
        "layout": entry.layout.fingerprint.hex(),
        "tier": pb.Tier.Name(entry.tier).removeprefix("TIER_").lower(),
        "num_blocks": entry.num_blocks,
        "block_bytes": entry.layout.block_bytes,
    }


async def _fingerprint(store: KvStore, beginning: str) -> bytes:
    """The one layout whose fingerprint begins so; empty for an empty beginning."""
    if not beginning:
        return b""
    known = {entry.layout.fingerprint for entry in await _layouts(store)}
    found = [fingerprint for fingerprint in known if fingerprint.hex().startswith(beginning.lower())]
    if len(found) != 1:
        raise InvalidParameter("--layout", f"{len(found)} layouts begin with {beginning!r}; see octavo kv list")
    return found[0]


def _token_ids(prompt: str, chat: bool, target: str) -> Sequence[int]:
    """As a server tokenises it; of one that is protected, --tokens says what it would."""
    with connect(target, token="", tls_ca=None) as client:
        return client.tokenize([ChatMessage("user", prompt)] if chat else prompt).token_ids


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise InvalidParameter("--key", f"{text!r} is no key: 64 hexadecimal digits")
    return key


async def _exported(chunks: AsyncIterable[admin_pb.ExportBlocksResponse]) -> AsyncIterator[tuple[ArchivedBlock, int]]:
    """Whole blocks, and how many come at most."""
    first: admin_pb.ExportBlocksResponse | None = None
    parts: list[bytes] = []
    async for chunk in chunks:
        if chunk.key:
            first, parts = chunk, []
        if first is None:
            continue
        parts.append(chunk.data)
        if sum(map(len, parts)) == first.layout.block_bytes:
            yield ArchivedBlock(first.key, first.layout.fingerprint, first.checksum, b"".join(parts)), first.num_blocks
            first = None
