"""Simulations side by side as one HTML file that needs nothing else. Knows outcomes and charts."""

import html
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from scheduler_svc.simulation.chart import Series, line_chart, stacked
from scheduler_svc.simulation.outcome import Outcome, Sample, Served, percentile, tpots, ttfts

_BINS = 60
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1e23; --soft: #666c75; --grid: #e4e6ea; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #9aa0a8; --grid: #34373d; --paper: #1a1c20; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto; max-width: 1300px;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } svg .title { font-weight: 600; fill: var(--ink); font-size: 13px; }
svg .tick { fill: var(--soft); font-size: 11px; } svg .grid { stroke: var(--grid); stroke-width: 1; }
"""


def write_report(path: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """Writes the file; one outcome for each policy."""
    tenants = sorted({one.arrival.tenant for outcome in outcomes for one in outcome.served})
    shared = "".join(
        [
            _over_time("TTFT p50", "ms", [(o, _binned(o, _ttft_ms, 50)) for o in outcomes]),
            _over_time("TTFT p99", "ms", [(o, _binned(o, _ttft_ms, 99)) for o in outcomes]),
            _over_time("TPOT p50", "ms", [(o, _binned(o, _tpot_ms, 50)) for o in outcomes]),
            _over_time("TPOT p99", "ms", [(o, _binned(o, _tpot_ms, 99)) for o in outcomes]),
            _over_time("Requests in the queue", "", [(o, [(s.at_s, s.num_waiting) for s in o.samples]) for o in outcomes]),
            _over_time("Sequences in the batch", "", [(o, [(s.at_s, s.num_running) for s in o.samples]) for o in outcomes]),
            _over_time("Blocks in use", "%", [(o, [(s.at_s, _used(s)) for s in o.samples]) for o in outcomes]),
        ]
    )
    shares = "".join(
        line_chart(f"Tokens/s by tenant: {o.policy}", "s", "tokens/s", stacked([_speed(o, tenant) for tenant in tenants]))
        for o in outcomes
    )
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{html.escape(title)}</h1>{_table(outcomes)}"
        f'<h2>Over time</h2><div class="charts">{shared}</div>'
        f'<h2>Share per tenant</h2><div class="charts">{shares}</div></html>'
    )


def rows_of(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """A table of figures: the first row names them."""
    head = (
        "policy",
        "requests",
        "failed",
        "TTFT p50 ms",
        "p99 ms",
        "TPOT p50 ms",
        "p99 ms",
        "output tokens/s",
        "preemptions",
        "s",
    )
    return [head, *(_row(outcome) for outcome in outcomes)]


def _row(outcome: Outcome) -> tuple[str, ...]:
    first, per = ttfts(outcome.served), tpots(outcome.served)
    return (
        outcome.policy,
        str(len(outcome.served)),
        str(sum(bool(one.error) for one in outcome.served)),
        f"{1e3 * percentile(first, 50):.0f}",
        f"{1e3 * percentile(first, 99):.0f}",
        f"{1e3 * percentile(per, 50):.1f}",
        f"{1e3 * percentile(per, 99):.1f}",
        f"{outcome.num_output_tokens / max(outcome.end_s, 1e-9):.0f}",
        str(outcome.num_preemptions),
        f"{outcome.end_s:.1f}",
    )


def _table(outcomes: Sequence[Outcome]) -> str:
    head, *rows = rows_of(outcomes)
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _over_time(title: str, unit: str, lines: Sequence[tuple[Outcome, Sequence[tuple[float, float]]]]) -> str:
    return line_chart(title, "s", unit, [Series(outcome.policy, points) for outcome, points in lines])


def _binned(outcome: Outcome, value: Callable[[Served], float | None], percent: int) -> list[tuple[float, float]]:
    """A percentile of the requests that came at about the same time."""
    end_s = max(one.arrival.at_s for one in outcome.served) or 1.0
    bins: dict[int, list[float]] = {}
    for one in outcome.served:
        found = value(one)
        if found is not None:
            bins.setdefault(min(_BINS - 1, int(one.arrival.at_s / end_s * _BINS)), []).append(found)
    return [((number + 0.5) * end_s / _BINS, percentile(values, percent)) for number, values in sorted(bins.items())]


def _ttft_ms(one: Served) -> float | None:
    return None if one.ttft_s is None else 1e3 * one.ttft_s


def _tpot_ms(one: Served) -> float | None:
    return None if one.tpot_s is None else 1e3 * one.tpot_s


def _used(sample: Sample) -> float:
    return 100 * sample.num_used_blocks / max(1, sample.num_blocks)


def _speed(outcome: Outcome, tenant: str) -> Series:
    """Tokens a second of a tenant, over some samples each."""
    samples = outcome.samples[:: max(1, len(outcome.samples) // _BINS)]
    points = [
        (now.at_s, (now.tokens_by_tenant.get(tenant, 0) - before.tokens_by_tenant.get(tenant, 0)) / (now.at_s - before.at_s))
        for before, now in itertools.pairwise(samples)
    ]
    return Series(tenant or "all", points)
