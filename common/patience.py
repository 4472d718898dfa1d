"""How long somebody waits for a chain of blocks. A value that crosses all three services; knows no clock."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """A deadline that moves: each block that has come is one less to compute, so it makes it worth waiting for the next.

    Attributes:
        first_s: seconds from the start until the first block.
        per_block_s: seconds more, for each block that has come.
    """

    first_s: float
    per_block_s: float = 0.0

    def seconds(self, num_blocks: int) -> float:
        """From the start, when so many blocks have come."""
        return self.first_s + num_blocks * self.per_block_s

    def at_most(self, seconds: float, num_blocks: int) -> "Patience":
        """The same, but for so many blocks not longer than this."""
        first_s = min(self.first_s, seconds)
        return Patience(first_s, min(self.per_block_s, (seconds - first_s) / max(1, num_blocks)))

    def after(self, elapsed_s: float, num_blocks: int) -> "Patience":
        """What is left of it for the blocks behind those that have come."""
        return Patience(self.seconds(num_blocks) - elapsed_s, self.per_block_s)
