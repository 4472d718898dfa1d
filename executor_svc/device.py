"""What an executor needs of the device that it computes on, and the first steps of every start. Knows no particular device."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from common.errors import StartupError
from common.ids import BlockId, SeqId
from executor_svc.core.plan import BatchLimits, Chunk, NewSequence, StepPlan
from executor_svc.core.sampling import SamplingParams
from executor_svc.kernels.backend import Backend
from executor_svc.kernels.layout import KvLayout
from executor_svc.model.load import LoadedModel, Rewrites
from executor_svc.runner import StepRunner
from executor_svc.transfer import BlockMemory


class Phases:
    """Seconds by phase of the start, in order."""

    def __init__(self, before: Mapping[str, float]):
        self._seconds = dict(before)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Times the with block."""
        started = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - started

    def seconds(self, load_parts: Mapping[str, float]) -> list[tuple[str, float]]:
        """All phases; "load" is split into the loader's own parts and the rest."""
        found: list[tuple[str, float]] = []
        for name, seconds in self._seconds.items():
            if name == "load":
                found += load_parts.items()
                seconds -= sum(load_parts.values())
            found.append((name, max(0.0, seconds)))
        return found


class Pool(Protocol):
    """The KV pool of a device."""

    num_blocks: int
    block_size: int
    dtype: torch.dtype
    layout: KvLayout
    block_bytes: int
    num_bytes: int

    def zero(self) -> None:
        """Sets every byte to zero."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError when views and blocks do not belong together."""
        ...


@dataclass(frozen=True)
class Started:
    """A model on its device, ready for plans.

    Attributes:
        blocks: the pool as transfers see it.
        memory_bytes: by purpose, weights not counted.
        description: of the device, for people.
    """

    runner: StepRunner
    pool: Pool
    blocks: BlockMemory
    limits: BatchLimits
    memory_bytes: Mapping[str, int]
    description: str


class Device(Protocol):
    """One kind of device.

    Attributes:
        torch_device: where the model lives.
        backend: its attention.
        rewrites: of its models.
    """

    torch_device: torch.device
    backend: Backend
    rewrites: Rewrites

    def start(self, model: LoadedModel, phases: Phases, progress: Callable[[str], None]) -> Started:
        """Makes pool and runner and warms up.

        Args:
            model: loaded on torch_device.
            phases: takes the time of each part.
            progress: called with lines for people.

        Raises:
            StartupError: with what is wrong and which setting to change.
        """
        ...


def warm_up(runner: StepRunner, limits: BatchLimits) -> None:
    """Runs each kind of step once, which compiles kernels and takes the scratch memory of the largest step.

    The kinds: a chunk that samples nothing, the end of a prompt, a decode.

    Raises:
        StartupError: a step failed.
    """
    num_tokens = min(limits.max_num_batched_tokens, limits.max_model_len - 2, (limits.num_blocks * limits.block_size) - 2)
    if num_tokens < 1:
        raise StartupError("max_num_batched_tokens, max_model_len and the KV pool leave no room for a single step")
    blocks = [BlockId(i) for i in range(-(-(num_tokens + 2) // limits.block_size))]
    new = NewSequence(SeqId(1), [1] * (num_tokens + 1), num_tokens + 1, 0, blocks, SamplingParams(temperature=0.0))
    run_steps(
        runner,
        [
            StepPlan(step_id=1, new_sequences=[new], chunks=[Chunk(SeqId(1), num_tokens)]),
            StepPlan(step_id=2, chunks=[Chunk(SeqId(1), 1)]),
            StepPlan(step_id=3, chunks=[Chunk(SeqId(1), 1)]),
        ],
    )


def run_steps(runner: StepRunner, steps: list[StepPlan[SamplingParams]]) -> None:
    """Runs steps of a session that ends with them.

    Raises:
        StartupError: a step failed.
    """
    for step in steps:
        outcome = runner.execute(step)
        if outcome.failures:
            raise StartupError(f"the warm-up failed: {outcome.failures[0].message}")
    runner.reset()
