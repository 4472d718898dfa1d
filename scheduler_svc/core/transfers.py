"""Blocks that are on their way from or to the store. Transfers run beside the steps, so they hold references to their blocks.

Knows keys and blocks. Does not know requests: who waits for a load is the scheduler's business.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.ids import BlockId, BlockKey
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.plan import LoadPlan, SavePlan


@dataclass(frozen=True, slots=True)
class Load:
    """A load under way.

    Attributes:
        prefix: blocks in front of the loaded ones; held, because the loaded ones are of no use without them.
    """

    prefix: list[BlockId]
    keys: list[BlockKey]
    block_ids: list[BlockId]


class Transfers:
    """See the module's first lines. Ids are never used again, so that news of a transfer before a restart is recognised."""

    _pool: BlockPool

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._loads: dict[int, Load] = {}
        self._saves: dict[int, list[BlockId]] = {}

    def restart(self, pool: BlockPool) -> None:
        """All transfers are void; from now on they concern this pool."""
        self._pool = pool
        self._loads.clear()
        self._saves.clear()

    def begin_load(self, prefix: list[BlockId], keys: Sequence[BlockKey], applied_step: int) -> LoadPlan | None:
        """Takes blocks for keys that follow a prefix, and promises the keys. Blocks that no step can touch, if there are enough.

        Returns:
            None: there are not enough blocks.
        """
        for block_id in prefix:
            self._pool.retain(block_id)
        block_ids = self._pool.allocate_settled(len(keys), applied_step) or self._pool.allocate(len(keys))
        if block_ids is None:
            self._pool.release(prefix)
            return None
        self._pool.index.promise(keys, None)
        load_id = next(self._ids)
        self._loads[load_id] = Load(prefix, list(keys), block_ids)
        return LoadPlan(load_id, tuple(keys), tuple(block_ids), self._pool.touched_until(block_ids))

    def end_load(self, load_id: int, num_loaded: int) -> None:
        """Lists the loaded blocks; they are cached now, and the rest is free. Unknown ids are fine."""
        load = self._loads.pop(load_id, None)
        if load is None:
            return
        self._pool.index.withdraw(load.keys, None)
        for key, block_id in zip(load.keys[:num_loaded], load.block_ids, strict=False):
            self._pool.index.add(key, block_id)
        self._pool.release(load.prefix + load.block_ids)

    @property
    def num_unsaved_blocks(self) -> int:
        """Blocks that take_saves would give."""
        return self._pool.num_unsaved

    def take_saves(self, max_blocks: int) -> SavePlan | None:
        """Takes blocks that were offered to the store."""
        taken = self._pool.take_unsaved(max_blocks)
        if not taken:
            return None
        save_id = next(self._ids)
        keys, block_ids = zip(*taken, strict=True)
        self._saves[save_id] = list(block_ids)
        return SavePlan(save_id, keys, block_ids)

    def end_save(self, save_id: int) -> None:
        """Lets go of the blocks. Unknown ids are fine."""
        self._pool.release(self._saves.pop(save_id, []))

    def held_blocks(self) -> Iterator[BlockId]:
        """Every block once for each reference that a transfer has to it."""
        for load in self._loads.values():
            yield from load.prefix
            yield from load.block_ids
        for block_ids in self._saves.values():
            yield from block_ids
