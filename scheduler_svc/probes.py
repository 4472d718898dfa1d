"""Small reads from tiers that no request waits for, so that a tier that was slow once gets another chance.

Knows the store and which speeds are doubted. Each probe brings a few blocks up into shared memory, where the next request that
wants them finds them: a prefix that is asked for again and again moves up, whatever its tier is like.

Shared memory is not probed. A probe would measure how fast the store answers, not how fast blocks are copied to the device; a
request can try, whose patience bounds what that costs.
"""

import asyncio
from collections.abc import Sequence

from common.clock import Clock
from common.ids import BlockKey
from scheduler_svc.clients.block_store import BlockStore
from scheduler_svc.core.load_policy import LoadPolicy

_BLOCKS_PER_PROBE = 8
_SHORTEST_PAUSE_S = 0.5
_MEMORY = "shm"


class Probes:
    """Of one executor's tiers.

    Args:
        store: what is probed.
        fingerprint, block_bytes: of the executor's blocks.
        policy: learns the speeds.
        clock: for the pauses between probes and the times of blocks.
    """

    def __init__(self, store: BlockStore, fingerprint: bytes, block_bytes: int, policy: LoadPolicy, clock: Clock):
        self._store = store
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._policy = policy
        self._clock = clock
        self._running: dict[str, asyncio.Task[None]] = {}
        self._not_before_s: dict[str, float] = {}

    def consider(self, tier: str, keys: Sequence[BlockKey]) -> None:
        """A request did without blocks of this tier; they are good for a probe, if it is time for one.

        Args:
            tier: its name.
            keys: of a chain, the first one in the tier.
        """
        if tier == _MEMORY:
            self._policy.forget(tier)
            return
        now_s = self._clock.now()
        if tier in self._running or now_s < self._not_before_s.get(tier, 0.0):
            return
        self._not_before_s[tier] = now_s + _SHORTEST_PAUSE_S
        task = self._running[tier] = asyncio.create_task(self._probe(tier, keys[:_BLOCKS_PER_PROBE]))
        task.add_done_callback(lambda _: self._running.pop(tier, None))

    def close(self) -> None:
        """Ends those under way."""
        for task in self._running.values():
            task.cancel()

    async def _probe(self, tier: str, keys: Sequence[BlockKey]) -> None:
        num_blocks, first_s, last_s = 0, 0.0, self._clock.now()
        started_s = last_s
        async for found in self._store.prefetch(keys, self._fingerprint, self._block_bytes):
            if found != tier:
                break
            last_s = self._clock.now()
            num_blocks += 1
            first_s = first_s or last_s - started_s
        seconds = (last_s if num_blocks else self._clock.now()) - started_s
        # A slow tier must not be asked all the time.
        self._not_before_s[tier] = max(self._not_before_s[tier], self._clock.now() + 10 * seconds)
        self._policy.speed(tier).note(num_blocks, first_s, seconds)
