"""Block table of one sequence: position p lies in slot p % block_size of block p // block_size. Knows ids only.

Append-only while the sequence runs: the executor keeps a copy and is told of new blocks alone.
"""

from common.ids import BlockId


class BlockTable:
    """See the module's first lines.

    Args:
        block_size: tokens per block.
    """

    __slots__ = ("block_ids", "block_size", "num_sent")

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.block_ids: list[BlockId] = []
        """In order of position."""
        self.num_sent = 0
        """How many of them the executor knows."""

    @property
    def num_slots(self) -> int:
        """Tokens that the blocks can hold."""
        return len(self.block_ids) * self.block_size

    def num_missing(self, num_tokens: int) -> int:
        """Blocks to add before num_tokens fit."""
        return max(0, -(-num_tokens // self.block_size) - len(self.block_ids))

    def take_unsent(self, num_tokens: int) -> tuple[BlockId, ...]:
        """Blocks that the executor has to hear of before it holds num_tokens tokens; they count as sent."""
        start = self.num_sent
        end = -(-num_tokens // self.block_size)
        if end <= start:
            return ()
        assert end <= len(self.block_ids), f"{num_tokens} tokens in {len(self.block_ids)} blocks of {self.block_size}"
        self.num_sent = end
        return tuple(self.block_ids[start:end])

    def clear(self) -> list[BlockId]:
        """Empties the table and returns what it held."""
        block_ids, self.block_ids, self.num_sent = self.block_ids, [], 0
        return block_ids
