"""Which device block holds the content of a key, and which keys somebody is about to compute.

Knows keys and block ids. Does not know reference counts, sequences or why a block goes away. A block is listed under one key
at most and a key has one block at most: content that was computed twice keeps its first block here.

A listed block is complete for every step planned from now on. It may not be computed yet: the executor runs plans in their
order, so a step may read what a step planned before it writes.
"""

from collections.abc import Iterable, Sequence

from common.ids import BlockId, BlockKey, SeqId


class PrefixIndex:
    """See the module's first lines."""

    def __init__(self) -> None:
        self._block_of: dict[BlockKey, BlockId] = {}
        self._key_of: dict[BlockId, BlockKey] = {}
        # None: a load from the store is under way.
        self._promised: dict[BlockKey, SeqId | None] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Blocks of the longest listed prefix of a chain."""
        blocks = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def key_of(self, block_id: BlockId) -> BlockKey | None:
        """The key that a block is listed under."""
        return self._key_of.get(block_id)

    def add(self, key: BlockKey, block_id: BlockId) -> bool:
        """Lists a block.

        Returns:
            False: the key has a block already, which stays.
        """
        if key in self._block_of:
            return False
        assert block_id not in self._key_of, f"block {block_id} is listed under another key"
        self._block_of[key] = block_id
        self._key_of[block_id] = key
        return True

    def remove(self, block_id: BlockId) -> None:
        """Forgets a listed block."""
        del self._block_of[self._key_of.pop(block_id)]

    def promise(self, keys: Iterable[BlockKey], owner: SeqId | None) -> None:
        """The owner is going to compute these keys; None stands for a load. A key that has an owner keeps it."""
        for key in keys:
            self._promised.setdefault(key, owner)

    def withdraw(self, keys: Iterable[BlockKey], owner: SeqId | None) -> None:
        """Ends the owner's promises, kept or not."""
        if not self._promised:
            return
        for key in keys:
            if key in self._promised and self._promised[key] == owner:
                del self._promised[key]

    def is_promised(self, key: BlockKey) -> bool:
        """Whether waiting for the key is better than computing it."""
        return key in self._promised

    def block_ids(self) -> set[BlockId]:
        """All listed blocks."""
        return set(self._key_of)

    def promised_by(self) -> dict[BlockKey, SeqId | None]:
        """All promises and their owners."""
        return dict(self._promised)

    def check_integrity(self) -> None:
        """Raises AssertionError unless both directions agree."""
        assert len(self._block_of) == len(self._key_of), f"{len(self._block_of)} keys, {len(self._key_of)} blocks"
        for key, block_id in self._block_of.items():
            assert self._key_of.get(block_id) == key, f"block {block_id} is listed under another key than it says"
