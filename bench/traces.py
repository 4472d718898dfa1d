"""Public traces of requests as arrival times and lengths. Knows their file formats; generates no tokens."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

TRACE_FILES = {
    "azure conv": "azure_llm_2023_conv.csv",
    "azure code": "azure_llm_2023_code.csv",
    "mooncake": "mooncake_conversation.jsonl",
}
"""Of the Azure Public Dataset and of the Mooncake FAST'25 release, by the names of this project."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request.

    Attributes:
        arrival_s: since the first.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int


def read_trace(path: Path) -> list[TracedRequest]:
    """All requests of a file, in order of arrival.

    Raises:
        OSError: it cannot be read.
        ValueError, KeyError: it is none of the known formats.
    """
    rows = list(_mooncake(path) if path.suffix == ".jsonl" else _azure(path))
    start_s = min(at_s for at_s, _, _ in rows)
    return sorted((TracedRequest(at_s - start_s, *lengths) for at_s, *lengths in rows), key=lambda one: one.arrival_s)


def _azure(path: Path) -> Iterator[tuple[float, int, int]]:
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # of seven digits behind the point, datetime takes six
            yield at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"])


def _mooncake(path: Path) -> Iterator[tuple[float, int, int]]:
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            yield row["timestamp"] / 1000, row["input_length"], row["output_length"]
