"""The workloads behind every figure, one definition each. Knows token ids and lengths, nothing of servers or peers."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkItem:
    """One request: these tokens in, exactly num_output_tokens greedy tokens out."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests that are sent at once."""

    name: str
    items: tuple[WorkItem, ...]

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
