"""A tier that is slower than it is, for tests and benchmarks: what a tier of another speed would do to requests.

Knows bytes and time. Reads share one link, first come, first served: each takes its bytes' time of it, after the latency.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from common.clock import Clock
from common.ids import BlockKey
from kvstore_svc.tiers.base import FoundBlock, LowerTier, StoredBlock, TierCounts


@dataclass(frozen=True, slots=True)
class Throttle:
    """How slow.

    Attributes:
        tier: the name of the tier.
        bytes_per_s: of all reads together.
        latency_s: of each read and each look-up.
    """

    tier: str
    bytes_per_s: float
    latency_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Throttle":
        """From "tier=bytes per second" or "tier=bytes per second:seconds of latency".

        Raises:
            ValueError: it is neither; says what is expected.
        """
        tier, _, rates = text.partition("=")
        bytes_per_s, _, latency_s = rates.partition(":")
        try:
            throttle = cls(tier, float(bytes_per_s), float(latency_s or 0.0))
        except ValueError:
            throttle = None
        if throttle is None or not tier or throttle.bytes_per_s <= 0 or throttle.latency_s < 0:
            raise ValueError(f"throttle {text!r}: expected tier=bytes_per_s or tier=bytes_per_s:latency_s, like disk=1e9:0.001")
        return throttle


class ThrottledTier:
    """A LowerTier that passes everything on to another one, reads after a while."""

    def __init__(self, tier: LowerTier, throttle: Throttle, clock: Clock):
        self.name = tier.name
        self._tier = tier
        self._throttle = throttle
        self._clock = clock
        self._free_at_s = 0.0

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See LowerTier."""
        await asyncio.sleep(self._throttle.latency_s)
        return await self._tier.contains(keys)

    async def get(self, key: BlockKey, into: memoryview) -> FoundBlock | None:
        """See LowerTier."""
        now_s = self._clock.now()
        self._free_at_s = max(now_s, self._free_at_s) + into.nbytes / self._throttle.bytes_per_s
        await asyncio.sleep(self._free_at_s + self._throttle.latency_s - now_s)
        return await self._tier.get(key, into)

    async def put(self, block: StoredBlock, data: memoryview) -> bool:
        """See LowerTier."""
        return await self._tier.put(block, data)

    async def evict(self, key: BlockKey) -> bool:
        """See LowerTier."""
        return await self._tier.evict(key)

    async def clear(self, fingerprint: bytes | None) -> int:
        """See LowerTier."""
        return await self._tier.clear(fingerprint)

    def counts(self) -> TierCounts:
        """See LowerTier."""
        return self._tier.counts()


def throttled(tiers: Sequence[LowerTier], throttles: Sequence[Throttle], clock: Clock) -> list[LowerTier]:
    """The tiers, those that are named slower."""
    by_name = {throttle.tier: throttle for throttle in throttles}
    return [ThrottledTier(tier, by_name[tier.name], clock) if tier.name in by_name else tier for tier in tiers]
