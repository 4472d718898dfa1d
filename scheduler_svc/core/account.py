"""What one payer uses, as plain counters: the places that hand things out count, a policy turns the counts into an order."""

from dataclasses import dataclass, field

from scheduler_svc.core.ticks import Ticks


@dataclass(slots=True, eq=False)
class Account:
    """See the module's first line.

    Attributes:
        num_running: sequences in the batch.
        num_blocks: device blocks in their tables; a block counts for each table that has it.
    """

    num_running: int = 0
    num_blocks: int = 0
    _num_decodes: int = field(default=0, init=False)
    _num_decoding: int = field(default=0, init=False)
    _ticks: Ticks = field(default_factory=Ticks, init=False)

    @property
    def num_decodes(self) -> int:
        """Chunks of one token that were planned since the start."""
        return self._num_decodes + self._num_decoding * self._ticks.count

    def note_decode(self) -> None:
        """A chunk of one token was planned."""
        self._num_decodes += 1

    def begin_decoding(self, ticks: Ticks) -> None:
        """One more sequence has such a chunk in every step from now on. All of an account's are in steps of the same count."""
        self._ticks = ticks
        self._num_decoding += 1
        self._num_decodes -= ticks.count

    def end_decoding(self) -> None:
        """One sequence less."""
        self._num_decoding -= 1
        self._num_decodes += self._ticks.count
