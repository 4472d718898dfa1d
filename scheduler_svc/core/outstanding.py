"""Steps that were planned and whose results are not in: what has to be settled when they come, or undone when they fail."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.ids import BlockId
from scheduler_svc.core.sequence import PlannedChunk, Sequence


@dataclass(slots=True)
class PlannedStep:
    """A step in flight.

    Attributes:
        chunks: in the order of the plan.
        attached: sequences that were admitted with a prefix computed by others.
        listed: blocks that the prefix index got because of this step, and whose they are.
    """

    step_id: int
    chunks: list[PlannedChunk]
    attached: list[Sequence]
    listed: list[tuple[BlockId, Sequence]] = field(default_factory=list)


class OutstandingSteps:
    """Planned steps, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[PlannedStep] = deque()

    def __iter__(self) -> Iterator[PlannedStep]:
        return iter(self._steps)

    def append(self, step: PlannedStep) -> None:
        """A step was planned."""
        self._steps.append(step)

    @property
    def newest(self) -> PlannedStep | None:
        """The step planned last, if its result is not in."""
        return self._steps[-1] if self._steps else None

    def pop(self, step_id: int) -> PlannedStep:
        """Takes out the oldest step.

        Raises:
            ValueError: step_id is another one.
        """
        if not self._steps or self._steps[0].step_id != step_id:
            expected = self._steps[0].step_id if self._steps else None
            raise ValueError(f"result of step {step_id}, the next one to come is {expected}")
        return self._steps.popleft()
