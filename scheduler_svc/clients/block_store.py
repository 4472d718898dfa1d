"""What the engine asks of the block store, whoever answers. Types only."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from common.ids import BlockKey


class BlockStore(Protocol):
    """Look-ups in the tiers below the device. A failure is a miss, counted, never an error.

    Attributes:
        connected: False: every look-up is a miss; reason says why.
    """

    @property
    def connected(self) -> bool:
        """Whether the store answers."""
        ...

    @property
    def reason(self) -> str:
        """Why it does not; empty if it does."""
        ...

    async def lookup(self, keys: Sequence[BlockKey], timeout_s: float, wait_s: float) -> list[str]:
        """The tier of each of the leading keys that the store holds; shorter than keys where it ends.

        Args:
            keys: of a chain.
            timeout_s: a store that does not answer by then is left alone for a while.
            wait_s: what is not known by then counts as not there; at most timeout_s.
        """
        ...

    def prefetch(self, keys: Sequence[BlockKey], fingerprint: bytes, block_bytes: int) -> AsyncIterator[str]:
        """Brings leading blocks up into shared memory.

        Args:
            keys: of a chain.
            fingerprint: of its blocks' layout.
            block_bytes: of each.

        Yields:
            The tier that each was in, as it comes; ends early when one does not come, or the store fails.
        """
        ...

    async def note_use(self, keys: Sequence[BlockKey]) -> None:
        """Blocks of a chain are in use on a device: not looked up, but worth keeping."""
        ...
