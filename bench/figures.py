"""Figures: collected, printed as JSON lines and as a table. Knows nothing of what was measured."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass
class Figures:
    """Measured values, in the order of their taking."""

    rows: list[dict[str, str | float]] = field(default_factory=list)

    def add(
        self, workload: str, figure: str, values: Sequence[float] | float, unit: str, peer: str, *, model: str | None = None
    ) -> float:
        """Takes in the median of values and prints its JSON line.

        Args:
            workload: name of the workload.
            figure: what of it, for example "ttft".
            values: of repeated runs, or one.
            unit: of the values.
            peer: who was measured, for example "octavo float32" or "transformers float32".
            model: which model, where a benchmark has several; its rows also say how many runs are behind the median.

        Returns:
            The median.
        """
        value = statistics.median(values) if isinstance(values, Sequence) else values
        row: dict[str, str | float] = {
            "workload": workload,
            "figure": figure,
            "value": round(value, 4),
            "unit": unit,
            "peer": peer,
        }
        if model is not None:
            row = {"model": model, **row, "runs": len(values) if isinstance(values, Sequence) else 1}
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        return value

    def value(self, workload: str, figure: str, peer: str) -> float:
        """A figure that was taken before."""
        for row in self.rows:
            if (row["workload"], row["figure"], row["peer"]) == (workload, figure, peer):
                return float(row["value"])
        raise KeyError((workload, figure, peer))

    def print_table(self) -> None:
        """One row per workload and figure, one column per peer."""
        peers = list(dict.fromkeys(str(row["peer"]) for row in self.rows))
        table = Table("workload", "figure", "unit", *peers)
        cells: dict[tuple[str, str, str], dict[str, str]] = {}
        for row in self.rows:
            key = (str(row["workload"]), str(row["figure"]), str(row["unit"]))
            cells.setdefault(key, {})[str(row["peer"])] = f"{row['value']:g}"
        for key, values in cells.items():
            table.add_row(*key, *(values.get(peer, "") for peer in peers))
        Console(width=160).print(table)
