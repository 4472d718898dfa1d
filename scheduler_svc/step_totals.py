"""What the steps of one executor took, as sums since the start."""

from dataclasses import dataclass


@dataclass(slots=True)
class StepTotals:
    """See the module's first line; seconds."""

    num_steps: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0

    def add(self, busy_s: float, idle_s: float) -> None:
        """A step ended."""
        self.num_steps += 1
        self.busy_s += busy_s
        self.idle_s += idle_s
