"""What the GPU benchmark is told, and what that means for the services. Knows settings; starts nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu_cases import SMOKE, Sizes
from tests.e2e.stack import StackConfig


@dataclass(frozen=True)
class Options:
    """What to measure and how.

    Attributes:
        served, in_process: beginnings of names of workloads.
        starts: how often the services are started and timed.
        limit_s: of one workload, and of a start.
        more_executor, more_scheduler: further flags of the services, for experiments.
        with_store: whether there is a block store in the workloads that do not ask for one.
        store_bytes: of a block store.
    """

    models: tuple[str, ...]
    served: tuple[str, ...]
    in_process: tuple[str, ...]
    sizes: Sizes
    device: str
    repeat: int = 2
    starts: int = 2
    limit_s: float = 150.0
    num_clients: int = 4
    num_threads: int = 4
    max_num_batched_tokens: int = 8192
    trace: Path | None = None
    mooncake_trace: Path | None = None
    more_executor: tuple[str, ...] = ()
    more_scheduler: tuple[str, ...] = ()
    with_store: bool = False
    store_bytes: int = 60 << 30

    @property
    def executor_settings(self) -> dict[str, Any]:
        """Of both ways of serving."""
        settings: dict[str, Any] = {
            "load_format": "random",
            "device": self.device,
            "max_num_seqs": 0 if self.device == "cuda" else 8,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "num_threads": self.num_threads,
        }
        settings |= {"dtype": "bfloat16"} if self.device == "cuda" else {"num_blocks": 256, "backend": "torch"}
        more = self.more_executor
        settings |= {name.removeprefix("--").replace("-", "_"): value for name, value in zip(more[::2], more[1::2], strict=True)}
        return settings

    def stack_config(self, folder: Path) -> StackConfig:
        """Of the services."""
        settings = {name: value for name, value in self.executor_settings.items() if name != "num_threads"}
        flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        return StackConfig(
            model=folder,
            executor_flags=tuple(flags),
            scheduler_flags=self.more_scheduler,
            store_flags=("--capacity-bytes", str(self.store_bytes)),
            with_store=self.with_store,
            num_threads=self.num_threads,
        )


def smoke_options(trace: Path | None = None) -> Options:
    """A tiny model on the CPU."""
    served = ("decode", "prefill", "mixed", "prefix", "turns", "reload", *(("azure",) if trace is not None else ()))
    return Options(
        ("tiny",), served, ("decode 4", "mixed"), SMOKE, "cpu",
        repeat=1, starts=1, limit_s=60.0, num_clients=2, num_threads=1, max_num_batched_tokens=64, trace=trace,
        store_bytes=64 << 20,
    )  # fmt: skip
