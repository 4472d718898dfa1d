"""The workloads behind every figure, one definition each. Knows token ids and lengths, nothing of servers or peers."""

import csv
import json
import random
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True)
class WorkItem:
    """One request: these tokens in, exactly num_output_tokens greedy tokens out.

    Attributes:
        arrival_s: when it is sent, from the start of the workload.
    """

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Requests, sent at once unless they say otherwise."""

    name: str
    items: tuple[WorkItem, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(item.prompt_token_ids) for item in self.items)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(item.num_output_tokens for item in self.items)


def _token_ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randint(10, 30_000) for _ in range(count))


def cpu_a(seed: int = 0) -> Workload:
    """One request: 128 tokens in, 128 out."""
    return Workload("cpu-a", (WorkItem(_token_ids(random.Random(seed), 128), 128),))


def cpu_b(seed: int = 0) -> Workload:
    """16 requests at once: 32..512 tokens in, 32..128 out."""
    rng = random.Random(seed)
    sizes = [(rng.randint(32, 512), rng.randint(32, 128)) for _ in range(16)]
    return Workload("cpu-b", tuple(WorkItem(_token_ids(rng, size), out) for size, out in sizes))


def cpu_c(seed: int = 0) -> Workload:
    """8 requests at once that share 512 tokens: 16 tokens of their own, 32 out."""
    rng = random.Random(seed)
    shared = _token_ids(rng, 512)
    return Workload("cpu-c", tuple(WorkItem(shared + _token_ids(rng, 16), 32) for _ in range(8)))


def decode(batch: int, seed: int, num_prompt_tokens: int = 1024, num_output_tokens: int = 129) -> Workload:
    """A batch of requests of one length at once."""
    rng = random.Random(seed)
    items = (WorkItem(_token_ids(rng, num_prompt_tokens), num_output_tokens) for _ in range(batch))
    return Workload(f"decode {batch}", tuple(items))


def prefill(batch: int, num_prompt_tokens: int, seed: int) -> Workload:
    """A batch of prompts of one length at once, one token out."""
    return Workload(f"prefill {batch} x {num_prompt_tokens}", decode(batch, seed, num_prompt_tokens, 1).items)


def mixed(seed: int, num_requests: int = 256, shortest: int = 100, longest: int = 1024) -> Workload:
    """Requests at once, prompt and output lengths uniform in shortest..longest."""
    rng = random.Random(seed)
    sizes = [(rng.randint(shortest, longest), rng.randint(shortest, longest)) for _ in range(num_requests)]
    return Workload("mixed", tuple(WorkItem(_token_ids(rng, size), out) for size, out in sizes))


def prefix(seed: int = 2, num_requests: int = 64, num_shared: int = 8192, num_own: int = 128, num_output: int = 64) -> Workload:
    """Requests at once that share their beginning."""
    rng = random.Random(seed)
    shared = _token_ids(rng, num_shared)
    return Workload("prefix", tuple(WorkItem(shared + _token_ids(rng, num_own), num_output) for _ in range(num_requests)))


def azure(trace: Path, rate: float, seed: int = 3, first_row: int = 2000, seconds: float = 30.0) -> Workload:
    """Lengths and arrivals of a trace, its arrivals squeezed into a mean rate; bursts stay.

    Args:
        trace: CSV with TIMESTAMP, ContextTokens and GeneratedTokens.
        rate: requests a second.
        seed: of the token ids.
        first_row: of the trace, counted from 0 without the heading.
        seconds: of arrivals.

    Raises:
        ValueError: the trace has too few rows.
    """
    num_requests = round(rate * seconds)
    with trace.open(newline="") as file:
        rows = list(csv.DictReader(file))[first_row : first_row + num_requests]
    if len(rows) < num_requests:
        raise ValueError(f"{trace} has {len(rows)} rows from row {first_row} on, {num_requests} are needed")
    arrivals = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    scale = seconds / max(arrivals[-1] - arrivals[0], 1e-9)
    rng = random.Random(seed)
    items = (
        WorkItem(_token_ids(rng, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])), (at - arrivals[0]) * scale)
        for row, at in zip(rows, arrivals, strict=True)
    )
    return Workload(f"azure {rate:g}", tuple(items))


@dataclass(frozen=True)
class Conversation:
    """One user: each turn's prompt is everything said before and new tokens.

    Attributes:
        new_token_ids: of each turn.
    """

    new_token_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Turns:
    """Users who come back, in order of turns and in each turn of users.

    Attributes:
        num_in_flight: the most requests at once.
        num_output_tokens: of every answer.
    """

    name: str
    conversations: tuple[Conversation, ...]
    num_in_flight: int
    num_output_tokens: int


def turns(
    num_users: int, num_turns: int, num_in_flight: int, num_first: int = 4096, num_new: int = 512, num_output: int = 128
) -> Turns:
    """Conversations that grow by their answers and new tokens; user u's tokens come from seed 7000 + u."""
    conversations = []
    for user in range(num_users):
        rng = random.Random(7000 + user)
        conversations.append(Conversation(tuple(_token_ids(rng, num_new if turn else num_first) for turn in range(num_turns))))
    return Turns(f"turns {num_users}:{num_turns}:{num_in_flight}", tuple(conversations), num_in_flight, num_output)


def mooncake(
    trace: Path, num_requests: int, speed: float, max_prompt_tokens: int = 30_000, max_output_tokens: int = 256
) -> Workload:
    """The first requests of a trace of conversations; a hash id stands for 512 tokens, the same wherever it is.

    Args:
        trace: JSON lines with timestamp in ms, input_length, output_length and hash_ids.
        num_requests: how many.
        speed: how many times as fast as it was.
        max_prompt_tokens: longer prompts are left out.
        max_output_tokens: longer outputs are cut.
    """
    items = []
    with trace.open() as file:
        for line in file:
            row = json.loads(line)
            if row["input_length"] > max_prompt_tokens:
                continue
            ids = [i for hash_id in row["hash_ids"] for i in _token_ids(random.Random(hash_id), 512)]
            num_output = max(1, min(row["output_length"], max_output_tokens))
            items.append(WorkItem(tuple(ids[: row["input_length"]]), num_output, row["timestamp"] / 1e3 / speed))
            if len(items) == num_requests:
                break
    return Workload(f"mooncake {num_requests} x {speed:g}", tuple(items))
