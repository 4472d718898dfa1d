"""What a server has done so far. Plain numbers; knows nothing of where they come from."""

from dataclasses import dataclass, field


@dataclass
class Counters:
    """Sums since the start of the server.

    Attributes:
        busy_s: with a step, as the executor reports it.
        degraded: how often each degraded path was taken.
    """

    num_steps: int = 0
    busy_s: float = 0.0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    degraded: dict[str, int] = field(default_factory=dict)

    def since(self, before: "Counters") -> "Counters":
        """What was added since."""
        return Counters(
            self.num_steps - before.num_steps,
            self.busy_s - before.busy_s,
            self.num_preemptions - before.num_preemptions,
            self.num_cached_tokens - before.num_cached_tokens,
            {
                path: num - before.degraded.get(path, 0)
                for path, num in self.degraded.items()
                if num > before.degraded.get(path, 0)
            },
        )
