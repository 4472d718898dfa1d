"""Simulations side by side as one HTML file that needs nothing else. Knows outcomes, tables of them and charts."""

import html
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.simulation.chart import Series, line_chart, stacked
from scheduler_svc.simulation.outcome import Outcome, Sample, Served, percentile, tpots, ttfts
from scheduler_svc.simulation.tables import Rows, group_rows, rows_of

_BINS = 60
_RECORDED = "recorded"
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1e23; --soft: #666c75; --grid: #e4e6ea; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #9aa0a8; --grid: #34373d; --paper: #1a1c20; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto; max-width: 1300px;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } p { color: var(--soft); max-width: 60rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } svg .title { font-weight: 600; fill: var(--ink); font-size: 13px; }
svg .tick { fill: var(--soft); font-size: 11px; } svg .grid { stroke: var(--grid); stroke-width: 1; }
"""


@dataclass(frozen=True)
class Report:
    """What the file says.

    Attributes:
        title: for people.
        about: how it was made, a sentence or two.
        outcomes: one for each policy.
        recorded: what really happened to the same requests, where that is known.
    """

    title: str
    about: str
    outcomes: Sequence[Outcome]
    recorded: Sequence[Served] = ()

    def write(self, path: Path) -> None:
        """Makes the file."""
        groups = group_rows(self.outcomes)
        by_group = f"<h2>By tenant and class</h2>{_table(groups)}" if len(groups) > 1 + len(self.outcomes) else ""
        path.write_text(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(self.title)}</title>'
            f"<style>{_STYLE}</style><h1>{html.escape(self.title)}</h1><p>{html.escape(self.about)}</p>{_table(rows_of(self.outcomes))}{by_group}"
            f'<h2>Over requests</h2><div class="charts">{self._distributions()}</div>'
            f"<h2>Over time</h2><p>TTFT and TPOT: of the requests that came at about that time.</p>"
            f'<div class="charts">{self._over_time()}</div>'
            f'<h2>Share per tenant</h2><div class="charts">{self._shares()}</div></html>'
        )

    @property
    def _runs(self) -> list[tuple[str, Sequence[Served]]]:
        """Everything that requests can be compared in, by name."""
        recorded = [(_RECORDED, self.recorded)] if self.recorded else []
        return [*((outcome.policy, outcome.served) for outcome in self.outcomes), *recorded]

    def _distributions(self) -> str:
        return "".join(
            line_chart(f"Requests with at most this {name}", f"{name}, ms", "%", self._lines(of), y_high=100)
            for name, of in (("TTFT", ttfts), ("TPOT", tpots))
        )

    def _lines(self, of: Callable[[Sequence[Served]], list[float]]) -> list[Series]:
        return [Series(run, _shares_up_to(of(served))) for run, served in self._runs]

    def _over_time(self) -> str:
        latencies = "".join(
            self._chart(f"{name} p{percent}", "ms", [Series(run, _binned(served, value, percent)) for run, served in self._runs])
            for name, value in (("TTFT", _ttft_ms), ("TPOT", _tpot_ms))
            for percent in (50, 99)
        )
        return latencies + "".join(
            self._chart(title, unit, [Series(o.policy, [(s.at_s, value(s)) for s in o.samples]) for o in self.outcomes])
            for title, unit, value in _GAUGES
        )

    def _shares(self) -> str:
        tenants = sorted({one.arrival.tenant for outcome in self.outcomes for one in outcome.served})
        by_policy = {o.policy: stacked([_speed(o, tenant) for tenant in tenants]) for o in self.outcomes}
        highest = max((y for series in by_policy.values() for one in series for _, y in one.points), default=0.0)
        return "".join(
            self._chart(f"Prompt and output tokens a second: {policy}", "tokens/s", series, y_high=highest)
            for policy, series in by_policy.items()
        )

    def _chart(self, title: str, unit: str, series: Sequence[Series], y_high: float = 0.0) -> str:
        """Over the same time as all others."""
        end_s = max(outcome.end_s for outcome in self.outcomes)
        return line_chart(title, "time, s", unit, series, x_high=end_s, y_high=y_high)


def _table(rows: Rows) -> str:
    head, *body = rows
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in body]
    return '<div class="wide"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def _shares_up_to(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """Milliseconds, and the percentage of values up to there; the last hundredth is left out, it would be most of the axis."""
    return [(1e3 * percentile(seconds, percent), percent) for percent in range(1, 100)] if seconds else []


def _binned(served: Sequence[Served], value: Callable[[Served], float | None], percent: int) -> list[tuple[float, float]]:
    """A percentile of the requests that came at about the same time."""
    end_s = max(one.arrival.at_s for one in served) or 1.0
    bins: dict[int, list[float]] = {}
    for one in served:
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


_GAUGES: Sequence[tuple[str, str, Callable[[Sample], float]]] = (
    ("Requests in the queue", "requests", lambda sample: sample.num_waiting),
    ("Sequences in the batch", "sequences", lambda sample: sample.num_running),
    ("KV blocks in use", "%", _used),
)


def _speed(outcome: Outcome, tenant: str) -> Series:
    """Tokens a second of a tenant, over some samples each."""
    samples = outcome.samples[:: max(1, len(outcome.samples) // _BINS)]
    points = [
        (now.at_s, (now.tokens_by_tenant.get(tenant, 0) - before.tokens_by_tenant.get(tenant, 0)) / (now.at_s - before.at_s))
        for before, now in itertools.pairwise(samples)
    ]
    return Series(tenant or "all", points)
