"""Brings the blocks of conversations that will probably go on up into shared memory, before their next turn comes.

Knows the store and which conversations are expected (core/forecast/turns.py). Nobody waits for it: it reads while no request
loads blocks, a few at a time, and no more than a share of the shared memory holds blocks of turns that have not come.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from common.clock import Clock
from common.ids import BlockKey
from octavo.kvstore.v1 import kv_store_service_pb2 as kvstore_pb
from scheduler_svc.clients.block_store import BlockStore
from scheduler_svc.core.forecast.turns import Conversation
from scheduler_svc.engine import Engine

log = logging.getLogger(__name__)

_PAUSE_S = 0.1
_WINDOW_S = 30.0
"""Turns that are expected later are left where they are: what is brought up too soon is evicted again."""
_LEAST_PROBABILITY = 0.2
_BLOCKS_AT_A_TIME = 16
_LOOKUP_TIMEOUT_S = 0.5
_CAPACITY_EVERY_S = 30.0


class WarmStore(BlockStore, Protocol):
    """What is asked of the block store."""

    async def stats(self) -> kvstore_pb.GetStatsResponse | None:
        """Counters of the store; None when it does not answer."""
        ...


class Prewarmer:
    """See the module's first lines.

    Attributes:
        num_blocks: brought up so far.

    Args:
        share: of the store's shared memory that may be taken.
    """

    def __init__(self, engine: Engine, store: WarmStore, clock: Clock, share: float):
        self.num_blocks = 0
        self._engine = engine
        self._store = store
        self._clock = clock
        self._share = share
        self._capacity_blocks = 0.0
        self._capacity_at_s: float | None = None

    async def run(self) -> None:
        """Looks again and again; never returns."""
        while True:
            await asyncio.sleep(_PAUSE_S)
            await self.look()

    async def look(self) -> None:
        """Brings up what is expected first and is not up yet, if there is room for it."""
        model = self._engine.model
        if model is None or self._is_store_busy:
            return
        expected = self._engine.turns.expected(self._clock.now(), _WINDOW_S, _LEAST_PROBABILITY)
        conversation = next((one for one in expected if not one.warmed_blocks), None)
        if conversation is None:
            return
        room = self._share * await self._capacity(model.block_bytes) - self._engine.turns.num_warm_blocks
        if room >= len(conversation.keys):
            await self._warm(conversation, model.kv_fingerprint, model.block_bytes)

    async def _warm(self, conversation: Conversation, fingerprint: bytes, block_bytes: int) -> None:
        keys = conversation.keys[self._engine.num_device_blocks(conversation.keys) :]
        tiers = await self._store.lookup(keys, _LOOKUP_TIMEOUT_S, _LOOKUP_TIMEOUT_S)
        lower = [key for key, tier in zip(keys, tiers, strict=False) if tier != "shm"]
        log.debug("a turn is expected: %d blocks, %d in lower tiers", len(conversation.keys), len(lower))
        for begin in range(0, len(lower), _BLOCKS_AT_A_TIME):
            if self._is_store_busy:  # a request comes first; what is up is not read again next time
                return
            if not await self._bring_up(lower[begin : begin + _BLOCKS_AT_A_TIME], fingerprint, block_bytes):
                break
        conversation.warmed_blocks = len(conversation.keys)

    async def _bring_up(self, keys: Sequence[BlockKey], fingerprint: bytes, block_bytes: int) -> bool:
        num_up = 0
        async for _ in self._store.prefetch(keys, fingerprint, block_bytes):
            num_up += 1
        self.num_blocks += num_up
        return num_up == len(keys)

    @property
    def _is_store_busy(self) -> bool:
        return any(driver.is_loading for driver in self._engine.drivers)

    async def _capacity(self, block_bytes: int) -> float:
        """Blocks that the store's shared memory can hold; what a block takes there is more than its bytes."""
        now_s = self._clock.now()
        if self._capacity_at_s is None or now_s > self._capacity_at_s + _CAPACITY_EVERY_S:
            stats = await self._store.stats()
            self._capacity_blocks = 0.0
            for tier in stats.tiers if stats is not None else ():
                if tier.tier == kvstore_pb.TIER_SHM:
                    taken_bytes = tier.used_bytes / tier.num_blocks if tier.num_blocks else 0.0
                    self._capacity_blocks = tier.capacity_bytes / max(block_bytes, taken_bytes)
            self._capacity_at_s = now_s
        return self._capacity_blocks
