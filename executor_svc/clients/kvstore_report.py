"""What the block store client says it did. Data only."""

from dataclasses import dataclass, field


@dataclass
class SaveReport:
    """What became of the blocks of one save.

    Attributes:
        num_written: new in the store.
        num_present: there already, or being written by another client.
        num_failed: not in the store.
        reason: why, for one of the failed; empty if there are none.
    """

    num_written: int = 0
    num_present: int = 0
    num_failed: int = 0
    reason: str = ""


@dataclass
class LoadReport:
    """What became of the blocks of one load.

    Attributes:
        num_loaded: leading blocks whose bytes are verified; what is in the buffers of the others is undefined.
        num_by_tier: of them, by the tier they were found in.
        reason: why it is not all; empty if it is.
        seconds: that it took.
    """

    num_loaded: int = 0
    num_by_tier: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0

    def add(self, tier: str) -> None:
        """One more leading block is loaded."""
        self.num_loaded += 1
        self.num_by_tier[tier] = self.num_by_tier.get(tier, 0) + 1
