"""`octavo top`: the load of a server, live."""

import itertools
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from octavo.cli.connection import Target, TlsCa, Token, connect
from octavo.cli.console import out
from octavo.cli.sizes import format_bytes
from octavo.client import DEFAULT_TARGET
from octavo.load import Load, TierLoad


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    target: Target = DEFAULT_TARGET,
    token: Token = "",
    tls_ca: TlsCa = None,
) -> None:
    """Watch requests, tokens, blocks and tiers. Ctrl-C ends."""
    with connect(target, token, tls_ca, timeout_s=30.0) as client:
        looks = itertools.pairwise(client.watch_load(interval))
        if once:
            out.print(page(*next(looks)))
            return
        try:
            with Live(console=out, auto_refresh=False, screen=out.is_terminal) as live:
                for before, now in looks:
                    live.update(page(before, now), refresh=True)
        except KeyboardInterrupt:
            return


def page(before: Load, now: Load) -> RenderableType:
    """What is shown for two looks, one after the other: rates are differences."""
    seconds = max(now.uptime_s - before.uptime_s, 1e-9)
    prompt_rate = (now.num_prompt_tokens - before.num_prompt_tokens) / seconds
    output_rate = (now.num_output_tokens - before.num_output_tokens) / seconds
    prompts = max(now.num_prompt_tokens, 1)
    lines = [
        f"requests   {now.num_running_requests} running · {now.num_waiting_requests} waiting ({now.num_waiting_tokens:,} tokens)"
        f" · {now.num_finished_requests:,} finished · {now.num_failed_requests:,} failed"
        f" · {now.num_cancelled_requests:,} cancelled",
        f"tokens     {output_rate:,.1f}/s output · {prompt_rate:,.1f}/s prompt · {now.num_output_tokens:,} output"
        f" · {now.num_prompt_tokens:,} prompt",
        f"cache      {now.num_cached_tokens:,} prompt tokens not computed ({now.num_cached_tokens / prompts:.0%})"
        + "".join(f" · {count:,} {tier}" for tier, count in sorted(now.cached_tokens_by_tier.items()))
        + "".join(f" · kept in {kv_dtype}" for kv_dtype in sorted({one.kv_dtype for one in now.executors} - {""})),
        f"batching   {now.num_preemptions:,} preemptions · {now.num_discarded_tokens:,} discarded tokens"
        f" · up {now.uptime_s:,.0f} s",
    ]
    parts: list[RenderableType] = [Text("\n".join(lines)), Text(), _executors(now)]
    if now.tiers:
        parts += [Text(), _tiers(before, now), Text(), _reads(before, now)]
    off = [f"{tier.tier}: {tier.unavailable_reason}" for tier in now.tiers if tier.unavailable_reason]
    if off:
        parts += [Text(), Text(f"tiers off  {' · '.join(off)}", style="red")]
    if now.degraded:
        paths = " · ".join(f"{path} {count:,}" for path, count in sorted(now.degraded.items()))
        parts += [Text(), Text(f"degraded   {paths}", style="yellow")]
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _executors(load: Load) -> Table:
    columns = ("seqs", "blocks", "used", "shared", "cached", "free", "run", "frag", "waste", "step ms", "idle")
    table = _table("executor", *columns)
    for one in load.executors:
        name = Text(one.executor_id) if one.connected else Text(f"{one.executor_id} (lost)", style="red")
        blocks = (one.num_blocks, one.num_used_blocks, one.num_shared_blocks, one.num_cached_blocks, one.num_free_blocks)
        shares = (f"{one.kv_waste_ratio:.1%}", f"{one.step_s * 1e3:.1f}", f"{one.idle_ratio:.0%}")
        frag = _fragmentation(one.largest_free_run, one.num_free_blocks)
        table.add_row(name, f"{one.num_running_sequences}", *map(str, blocks), f"{one.largest_free_run}", frag, *shares)
    return table


def _tiers(before: Load, now: Load) -> Table:
    """The hit rate is of the time between the looks, if anything was asked for in it."""
    table = _table("tier", "used", "capacity", "blocks", "frag", "hits", "misses", "rate", "evicted")
    for old, tier in _pairs(before, now):
        hits, misses = tier.num_hits - old.num_hits, tier.num_misses - old.num_misses
        if hits + misses == 0:
            hits, misses = tier.num_hits, tier.num_misses
        table.add_row(
            tier.tier,
            format_bytes(tier.used_bytes),
            format_bytes(tier.capacity_bytes),
            f"{tier.num_blocks:,}",
            _fragmentation(tier.largest_free_run_bytes, tier.capacity_bytes - tier.used_bytes) if _has_runs(tier) else "",
            f"{tier.num_hits:,}",
            f"{tier.num_misses:,}",
            f"{hits / max(1, hits + misses):.0%}",
            f"{tier.num_evictions:,}",
        )
    return table


def _reads(before: Load, now: Load) -> Table:
    """How fast the tiers are: at the store, in the time between the looks if it read anything, and all the way to a device."""
    table = _table("reads", "bandwidth", "read ms", "to device", "bad", "late")
    for old, tier in _pairs(before, now):
        read_bytes, read_s = tier.read_bytes - old.read_bytes, tier.read_s - old.read_s
        if read_s <= 0:
            read_bytes, read_s = tier.read_bytes, tier.read_s
        table.add_row(
            tier.tier,
            f"{format_bytes(read_bytes / read_s)}/s" if read_s > 0 else "",
            f"{1e3 * tier.read_latency_s:.1f}" if read_s > 0 else "",
            f"{format_bytes(tier.load_bytes_per_s)}/s" if tier.load_bytes_per_s else "",
            f"{tier.num_verify_failures:,}",
            f"{tier.num_timeouts:,}",
        )
    return table


def _pairs(before: Load, now: Load) -> list[tuple[TierLoad, TierLoad]]:
    """Each tier as it was and as it is."""
    earlier = {tier.tier: tier for tier in before.tiers}
    return [(earlier.get(tier.tier, tier), tier) for tier in now.tiers]


def _has_runs(tier: TierLoad) -> bool:
    """Whether its room is one that can be in pieces."""
    return tier.tier == "shm"


def _fragmentation(largest_free_run: int, free: int) -> str:
    """Share of what is free that is not in the largest piece."""
    return f"{1 - largest_free_run / free:.0%}" if free > 0 else "0%"
