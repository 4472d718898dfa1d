"""A tier that could not be had when the store started: it has nothing, and says why."""

from collections.abc import Sequence

from common.ids import BlockKey
from kvstore_svc.tiers.base import FoundBlock, StoredBlock, TierCounts


class AbsentTier:
    """See LowerTier.

    Args:
        name: of the tier that should be here.
        reason: why it is not, for people.
    """

    def __init__(self, name: str, reason: str):
        self.name = name
        self._reason = reason

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Nothing is here."""
        return [False] * len(keys)

    async def get(self, key: BlockKey, into: memoryview) -> FoundBlock | None:
        """A miss."""
        return None

    async def put(self, block: StoredBlock, data: memoryview) -> bool:
        """Takes nothing, which has been said already: no news."""
        return True

    async def evict(self, key: BlockKey) -> bool:
        """Nothing was here."""
        return False

    async def close(self) -> None:
        """Nothing to close."""

    async def clear(self, fingerprint: bytes | None) -> int:
        """Nothing was here."""
        return 0

    def counts(self) -> TierCounts:
        """The reason, beside zeros."""
        return TierCounts(0, 0, 0, 0, 0, 0, 0, unavailable_reason=self._reason)
