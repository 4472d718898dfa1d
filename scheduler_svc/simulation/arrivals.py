"""Who comes when, and what they ask for: from public traces. Knows their formats; no scheduler.

azure      CSV with TIMESTAMP, ContextTokens, GeneratedTokens: prompts have nothing in common
mooncake   JSON lines with timestamp (ms), input_length, output_length, hash_ids: each id stands for 512 tokens
"""

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from common.errors import StartupError
from scheduler_svc.core.request import ServiceClass

_HASHED_TOKENS = 512
_FIRST_TOKEN = 10


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
    """The arrivals of a trace, by the end of its name.

    Raises:
        StartupError: it is none.
    """
    try:
        arrivals = azure(path) if path.suffix == ".csv" else mooncake(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"{path}: no trace of the formats that are known: {error!r}") from error
    if not arrivals:
        raise StartupError(f"{path}: an empty trace")
    return arrivals


def azure(path: Path) -> list[Arrival]:
    """A trace of the Azure Public Dataset."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return [
        Arrival(
            at_s=time_s - times[0],
            num_prompt_tokens=max(1, int(row["ContextTokens"])),
            num_output_tokens=max(1, int(row["GeneratedTokens"])),
            prompt=_own_prompt(number, max(1, int(row["ContextTokens"]))),
        )
        for number, (time_s, row) in enumerate(zip(times, rows, strict=True))
    ]


def mooncake(path: Path) -> list[Arrival]:
    """A trace of the Mooncake FAST'25 release."""
    arrivals = []
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            num_prompt = max(1, int(row["input_length"]))
            arrivals.append(
                Arrival(
                    at_s=row["timestamp"] / 1e3,
                    num_prompt_tokens=num_prompt,
                    num_output_tokens=max(1, int(row["output_length"])),
                    prompt=_hashed_prompt(tuple(row["hash_ids"]), num_prompt),
                )
            )
    return arrivals


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
