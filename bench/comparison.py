"""Octavo beside vLLM: ratios, who is ahead, and what the split into processes costs. Knows figures; measures nothing."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench import vllm
from bench.figures import Figures

Value = str | float
_SPLIT_FIGURES = frozenset({"step", "ttft", "prompt", "output", "cold", "again"})


@dataclass(frozen=True)
class Compared:
    """One figure of all sides; None: not measured.

    Attributes:
        times: how much better Octavo is than vLLM, above 1: ahead.
        split_cost: what Octavo loses by being several processes, as a share.
    """

    model: str
    workload: str
    figure: str
    unit: str
    vllm: float | None
    octavo: float | None
    in_process: float | None

    @property
    def times(self) -> float | None:
        if self.vllm is None or self.octavo is None:
            return None
        return _gain(self.octavo, self.vllm, self.unit)

    @property
    def split_cost(self) -> float | None:
        if self.octavo is None or self.in_process is None or self.figure not in _SPLIT_FIGURES:
            return None
        return 1 - _gain(self.octavo, self.in_process, self.unit)

    def as_row(self) -> dict[str, Value | bool | None]:
        """For a JSON line."""
        times, cost = self.times, self.split_cost
        return {
            "model": self.model,
            "workload": self.workload,
            "figure": self.figure,
            "unit": self.unit,
            "vllm": self.vllm,
            "octavo": self.octavo,
            "in process": self.in_process,
            "times vllm": None if times is None else round(times, 4),
            "ahead": None if times is None else times > 1,
            "split cost": None if cost is None else round(cost, 4),
        }


def _gain(value: float, other: float, unit: str) -> float:
    return value / other if unit in vllm.HIGHER_IS_BETTER else other / value


def compare(figures: Figures) -> list[Compared]:
    """All figures that were taken, in the order of their taking, beside vLLM's."""
    cells: dict[tuple[str, str, str, str], dict[str, float]] = {}
    for row in figures.rows:
        key = (str(row.get("model", "")), str(row["workload"]), str(row["figure"]), str(row["unit"]))
        cells.setdefault(key, {})[str(row["peer"])] = float(row["value"])
    return [
        Compared(*key, vllm.FIGURES.get(key[:3]), values.get("octavo"), values.get("in process")) for key, values in cells.items()
    ]


def print_comparison(compared: list[Compared]) -> None:
    """A table, then one sentence."""
    table = Table("model", "workload", "figure", "unit", "vLLM", "Octavo", "times", "ahead", "in process", "split costs")
    for line in compared:
        times, cost = line.times, line.split_cost
        table.add_row(
            *(line.model, line.workload, line.figure, line.unit, _number(line.vllm), _number(line.octavo)),
            *("" if times is None else f"{times:.2f}", "" if times is None else "yes" if times > 1 else "NO"),
            *(_number(line.in_process), "" if cost is None else f"{100 * cost:.1f} %"),
        )
    Console(width=150).print(table)
    times_all = [line.times for line in compared if line.times is not None]
    if times_all:
        print(f"ahead of vLLM at {sum(times > 1 for times in times_all)} of {len(times_all)} figures")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
