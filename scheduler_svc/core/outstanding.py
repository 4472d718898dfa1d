"""Steps that were planned and whose results are not in: what has to be settled when they come, or undone when they fail."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.ids import BlockId
from scheduler_svc.core.decodes import DecodeStep
from scheduler_svc.core.sequence import PlannedChunk, Sequence


@dataclass(slots=True)
class PlannedStep:
    """A step in flight.

    Attributes:
        decodes: of the sequences that just go on decoding; they come first.
        chunks: of the others, in the order of the plan.
        attached: sequences that were admitted with a prefix computed by others.
        listed: blocks that the prefix index got because of this step, and whose they are.
        void: sequences whose tokens of this step count no more.
    """

    step_id: int
    decodes: DecodeStep
    chunks: list[PlannedChunk]
    attached: list[Sequence]
    listed: list[tuple[BlockId, Sequence]] = field(default_factory=list)
    void: set[Sequence] = field(default_factory=set)


class OutstandingSteps:
    """Planned steps, oldest first.

    Attributes:
        planned_step_id: of the newest step that was planned.
        applied_step_id: of the newest step whose result came.
    """

    def __init__(self) -> None:
        self.planned_step_id = 0
        self.applied_step_id = 0
        self._steps: deque[PlannedStep] = deque()

    def __iter__(self) -> Iterator[PlannedStep]:
        return iter(self._steps)

    def append(self, step: PlannedStep) -> None:
        """A step was planned."""
        self._steps.append(step)
        self.planned_step_id = step.step_id

    @property
    def newest(self) -> PlannedStep | None:
        """The step planned last, if its result is not in."""
        return self._steps[-1] if self._steps else None

    def have(self, sequence: Sequence) -> bool:
        """Whether a chunk that counts of a sequence that is none of the decodes is in flight."""
        return sequence.last_step_id > self.applied_step_id

    def void(self, sequence: Sequence) -> None:
        """What is in flight of a sequence does not count any more."""
        for step in self._steps:
            step.void.add(sequence)

    def pop(self, step_id: int) -> PlannedStep:
        """Takes out the oldest step.

        Raises:
            ValueError: step_id is another one.
        """
        if not self._steps or self._steps[0].step_id != step_id:
            expected = self._steps[0].step_id if self._steps else None
            raise ValueError(f"result of step {step_id}, the next one to come is {expected}")
        self.applied_step_id = step_id
        return self._steps.popleft()
