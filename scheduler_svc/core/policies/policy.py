"""What a policy decides: who is admitted next, and who makes room. Everything else about a step is the planner's.

The planner asks for the first, admits it if there is room, and asks again. A sequence that waits for its blocks, or for what
others compute, is not with the policy meanwhile. A policy has no clock: it knows the time of the step.

What each policy has to keep, because the end of every request rests on it (preemption.py):
- first() is somebody as long as anybody is in; the same one until something changes.
- a sequence's tier does not change while it runs, and its claim is not below its tier.
- a victim is one of the candidates, and not protected.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Protocol

from scheduler_svc.core.request import Request
from scheduler_svc.core.sequence import Sequence


class Policy(Protocol):
    """See the module's first lines."""

    def begin_step(self, now_s: float) -> None:
        """A step is planned at this time; never earlier than the one before."""
        ...

    def insert(self, sequence: Sequence) -> None:
        """Somebody waits: new, preempted, or back from waiting for something else. Keeps the place of its arrival."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """One that waits here goes away without having been admitted."""
        ...

    def first(self) -> Sequence | None:
        """Who is to be admitted next, its tier and claim set; nothing changes. None: nobody waits here."""
        ...

    def admit(self, sequence: Sequence, num_new_tokens: int, num_cached_tokens: int) -> None:
        """The first gets its place.

        Args:
            sequence: what first() says.
            num_new_tokens: of it that have to be computed.
            num_cached_tokens: of it that need not.
        """
        ...

    def choose_victim(self, candidates: Seq[Sequence]) -> Sequence | None:
        """Who makes room.

        Args:
            candidates: running sequences, in order of rank, all behind whoever needs the room.

        Returns:
            None: all are protected.
        """
        ...

    def longest_step(self, sequence: Sequence) -> float | None:
        """How long a step with a chunk of this sequence's prompt may be, for the sake of others who may come.

        Returns:
            Times an empty step; None: as long as it is.
        """
        ...

    def steps_aside(self, sequence: Sequence, prompt: Sequence) -> bool:
        """Whether one that decodes should be left out of a step that has a chunk of another's prompt, so that it is shorter.

        If it is so of one, then of all behind it in rank. It is done in every other step at most.
        """
        ...

    def num_tokens_ahead(self, request: Request) -> int:
        """Prompt tokens that wait and are expected to be computed before a request that comes now."""
        ...

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait here, in any order."""
        ...
