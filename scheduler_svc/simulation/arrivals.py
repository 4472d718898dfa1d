"""Who comes when, and what they ask for: from public traces. Knows their formats; no scheduler.

azure      CSV with TIMESTAMP, ContextTokens, GeneratedTokens: prompts have nothing in common
mooncake   JSON lines with timestamp (ms), input_length, output_length, hash_ids: each id stands for 512 tokens
"""

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import StartupError
from scheduler_svc.core.request import ServiceClass

_HASHED_TOKENS = 512
_FIRST_TOKEN = 10
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        at_s: when it comes, from the start.
        num_prompt_tokens: of its prompt.
        num_output_tokens: that it draws.
        prompt: makes the prompt; equal beginnings are equal tokens.
        tenant: who pays for it.
        service_class: how urgent it is.
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prompt: Callable[[], tuple[int, ...]]
    tenant: str = ""
    service_class: ServiceClass = ServiceClass.STANDARD


def read_arrivals(path: Path) -> list[Arrival]:
    """The arrivals of a trace, by the end of its name, in order of time; the first comes at 0.

    Raises:
        StartupError: it is none, or a row of it is not; names the row.
    """
    try:
        arrivals = sorted(azure(path) if path.suffix == ".csv" else mooncake(path), key=lambda one: one.at_s)
    except (OSError, UnicodeError, csv.Error) as error:
        raise StartupError(f"{path}: cannot be read as a trace: {error}") from error
    if not arrivals:
        raise StartupError(f"{path}: an empty trace")
    return [replace(one, at_s=one.at_s - arrivals[0].at_s) for one in arrivals]


def azure(path: Path) -> Iterator[Arrival]:
    """A trace of the Azure Public Dataset."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in _AZURE_COLUMNS if name not in (reader.fieldnames or ())]:
            raise StartupError(
                f"{path}: an Azure trace has the columns {', '.join(_AZURE_COLUMNS)}; {', '.join(missing)} is missing"
            )
        for number, row in enumerate(reader):
            with _row(path, reader.line_num):
                num_prompt = _num_tokens(row, "ContextTokens")
                yield Arrival(
                    at_s=datetime.fromisoformat(
                        row["TIMESTAMP"][:26]
                    ).timestamp(),  # of seven digits behind the point, it takes six
                    num_prompt_tokens=num_prompt,
                    num_output_tokens=_num_tokens(row, "GeneratedTokens"),
                    prompt=_own_prompt(number, num_prompt),
                )


def mooncake(path: Path) -> Iterator[Arrival]:
    """A trace of the Mooncake FAST'25 release."""
    with path.open() as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            with _row(path, number):
                row = json.loads(line)
                num_prompt = _num_tokens(row, "input_length")
                yield Arrival(
                    at_s=float(row["timestamp"]) / 1e3,
                    num_prompt_tokens=num_prompt,
                    num_output_tokens=_num_tokens(row, "output_length"),
                    prompt=_hashed_prompt(tuple(map(int, row["hash_ids"])), num_prompt),
                )


@contextmanager
def _row(path: Path, line: int) -> Iterator[None]:
    """Says which line of a file is no request."""
    try:
        yield
    except KeyError as error:
        raise StartupError(f"{path}, line {line}: no request: {error} is missing") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise StartupError(f"{path}, line {line}: no request: {error}") from error


def _num_tokens(row: Mapping[str, Any], name: str) -> int:
    """At least 1: requests of nothing are in the traces, too."""
    num_tokens = int(row[name])
    if num_tokens < 0:
        raise ValueError(f"{name} is {num_tokens}, it has to be at least 0")
    return max(1, num_tokens)


def part_of(arrivals: Sequence[Arrival], first: int, num_requests: int | None, max_tokens: int) -> list[Arrival]:
    """Some of them, from the first on, without those that are longer than max_tokens altogether; the first comes at 0."""
    fitting = (one for one in arrivals[first:] if one.num_prompt_tokens + one.num_output_tokens <= max_tokens)
    taken = list(itertools.islice(fitting, num_requests))
    return [replace(one, at_s=one.at_s - taken[0].at_s) for one in taken]


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same, scaled to a mean of so many requests a second; bursts stay bursts."""
    length_s = arrivals[-1].at_s or 1.0
    scale = len(arrivals) / rate / length_s
    return [replace(one, at_s=one.at_s * scale) for one in arrivals]


def assign(arrivals: Iterable[Arrival], tenants: Sequence[str], classes: Sequence[ServiceClass]) -> Iterator[Arrival]:
    """Gives each the next tenant and class of the two rows, over and over."""
    for one, tenant, service_class in zip(arrivals, itertools.cycle(tenants), itertools.cycle(classes), strict=False):
        yield replace(one, tenant=tenant, service_class=service_class)


def _own_prompt(number: int, num_tokens: int) -> Callable[[], tuple[int, ...]]:
    return lambda: (_FIRST_TOKEN + number,) * num_tokens


def _hashed_prompt(hash_ids: tuple[int, ...], num_tokens: int) -> Callable[[], tuple[int, ...]]:
    def make() -> tuple[int, ...]:
        tokens = [_FIRST_TOKEN + hash_id for hash_id in hash_ids for _ in range(_HASHED_TOKENS)]
        tokens += [_FIRST_TOKEN - 1] * (num_tokens - len(tokens))
        return tuple(tokens[:num_tokens])

    return make
