"""The device's blocks: who is free, how often each is referenced, and which unreferenced ones still serve prefix hits.

Knows block ids, reference counts and the prefix index. Does not know sequences or the content of a block.

    free ── allocate ──> referenced (count >= 1) ── last release ──> free             not listed in the index
                              ^                  └─ last release ──> cached           listed
                              └────────── retain (a prefix hit) ───────┘└─ evict ──> free

Blocks come from a buddy allocator, in runs where memory allows. Cached blocks are evicted least recently used first. A table
is released from its end, so eviction takes a chain from its end too: the head, which more requests share, stays longest, and
neighbours leave one after another and merge again into the run that they came from.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from common.buddy import BuddyAllocator
from common.ids import BlockId, BlockKey
from scheduler_svc.core.prefix_index import PrefixIndex


class BlockPool:
    """See the module's first lines.

    Args:
        num_blocks: blocks of the device.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.index = PrefixIndex()
        self.planned_step = 0
        """The newest step planned; the scheduler moves it."""
        self.num_shared = 0
        """Blocks with more than one reference."""
        self._buddy = BuddyAllocator(num_blocks)
        self._num_refs = [0] * num_blocks
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        # Steps up to this one may still touch the block, though nobody refers to it any more.
        self._touched_until = [0] * num_blocks
        self._unsaved: dict[BlockId, BlockKey] = {}

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self._buddy.num_free_units

    @property
    def num_cached(self) -> int:
        """Blocks that nobody refers to, but that are good for prefix hits."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that allocate can hand out."""
        return self._buddy.num_free_units + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody refers to."""
        return self.num_blocks - self.num_available

    def free_run_figures(self) -> tuple[int, float]:
        """Length of the longest free run, and mean length of all. Costs O(num_blocks)."""
        return self._buddy.largest_free_run, self._buddy.mean_free_run

    def num_refs(self, block_id: BlockId) -> int:
        """References to a block."""
        return self._num_refs[block_id]

    def referenced(self) -> dict[BlockId, int]:
        """References of every block that has some. Costs O(num_blocks)."""
        return {BlockId(block_id): num_refs for block_id, num_refs in enumerate(self._num_refs) if num_refs}

    def num_cached_of(self, block_ids: Iterable[BlockId]) -> int:
        """How many of the blocks are cached: retaining them makes fewer available."""
        return sum(not self._num_refs[block_id] for block_id in block_ids)

    def allocate(self, num_blocks: int, after: BlockId | None = None) -> list[BlockId] | None:
        """Takes blocks with one reference each, evicting cached ones if need be.

        Args:
            num_blocks: at least 1.
            after: a block that they should follow in memory if that is possible.

        Returns:
            In order of position; None: not enough are free or cached, and nothing changed.
        """
        if num_blocks > self.num_available:
            return None
        self._evict(list(islice(self._cached, max(0, num_blocks - self._buddy.num_free_units))))
        if after is not None and self._buddy.allocate_at(after + 1, num_blocks):
            block_ids = [BlockId(after + 1 + i) for i in range(num_blocks)]
        else:
            runs = self._buddy.allocate_runs(num_blocks)
            assert runs is not None, f"{self._buddy.num_free_units} blocks are free, {num_blocks} were not found"
            block_ids = [BlockId(run.start + i) for run in runs for i in range(run.num_units)]
        for block_id in block_ids:
            self._num_refs[block_id] = 1
        return block_ids

    def allocate_one(self, after: BlockId) -> BlockId | None:
        """What allocate does, for the block that a sequence needs as it goes on."""
        buddy = self._buddy
        if not buddy.num_free_units:
            if not self._cached:
                return None
            self._evict([next(iter(self._cached))])
        if buddy.allocate_at(after + 1):
            block_id = BlockId(after + 1)
        else:
            start = buddy.allocate()
            assert start is not None, f"{buddy.num_free_units} blocks are free, none was found"
            block_id = BlockId(start)
        self._num_refs[block_id] = 1
        return block_id

    def allocate_settled(self, num_blocks: int, applied_step: int) -> list[BlockId] | None:
        """Like allocate, for a transfer that runs beside the steps: only blocks that no unapplied step can touch.

        Args:
            num_blocks: at least 1.
            applied_step: the newest step whose result is known.
        """
        settled: list[BlockId] = []
        unsettled: list[BlockId] = []
        while len(settled) < num_blocks:
            block_ids = self.allocate(num_blocks - len(settled))
            if block_ids is None:
                unsettled += settled
                settled = []
                break
            for block_id in block_ids:
                (settled if self._touched_until[block_id] <= applied_step else unsettled).append(block_id)
        for block_id in unsettled:
            self._num_refs[block_id] = 0
            self._buddy.free(block_id)
        return settled or None

    def touched_until(self, block_ids: Iterable[BlockId]) -> int:
        """The newest step that may touch one of the blocks though it was released before; 0: none may."""
        return max((self._touched_until[block_id] for block_id in block_ids), default=0)

    def retain(self, block_id: BlockId) -> None:
        """One more reference to a block that is referenced or cached."""
        num_refs = self._num_refs[block_id]
        if num_refs == 0:
            del self._cached[block_id]
        elif num_refs == 1:
            self.num_shared += 1
        self._num_refs[block_id] = num_refs + 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """One reference less to each block of a chain, from its end.

        Raises:
            ValueError: a block has no reference.
        """
        refs, touched_until, planned_step = self._num_refs, self._touched_until, self.planned_step
        key_of = self.index.key_of
        for block_id in reversed(block_ids):
            num_refs = refs[block_id]
            if num_refs == 0:
                raise ValueError(f"block {block_id} is released, but nobody refers to it")
            refs[block_id] = num_refs - 1
            if num_refs == 2:
                self.num_shared -= 1
            elif num_refs == 1:
                touched_until[block_id] = planned_step
                if key_of(block_id) is None:
                    self._buddy.free(block_id)
                else:
                    self._cached[block_id] = None

    def forget(self, block_id: BlockId) -> None:
        """Takes a block out of the index; it is free if nobody refers to it. Blocks that are not listed are fine."""
        if self.index.key_of(block_id) is None:
            return
        if block_id in self._cached:
            self._evict([block_id])
        else:
            self.index.remove(block_id)
            self._unsaved.pop(block_id, None)

    def flush(self) -> int:
        """Evicts every cached block and returns how many there were."""
        num_cached = len(self._cached)
        self._evict(list(self._cached))
        return num_cached

    def offer_save(self, key: BlockKey, block_id: BlockId) -> None:
        """The block is computed, and the store may have it if it is the one that is listed under the key."""
        if self.index.key_of(block_id) == key:
            self._unsaved[block_id] = key

    @property
    def num_unsaved(self) -> int:
        """Blocks that were offered and not taken."""
        return len(self._unsaved)

    def take_unsaved(self, max_blocks: int) -> list[tuple[BlockKey, BlockId]]:
        """Blocks that were offered, oldest first, with one more reference each."""
        taken: list[tuple[BlockKey, BlockId]] = []
        while self._unsaved and len(taken) < max_blocks:
            block_id = next(iter(self._unsaved))
            taken.append((self._unsaved.pop(block_id), block_id))
            self.retain(block_id)
        return taken

    def check_integrity(self) -> None:
        """Raises AssertionError with the values when free, cached and referenced blocks overlap or do not add up."""
        self._buddy.check_integrity()
        self.index.check_integrity()
        free = {unit for run in self._buddy.free_runs() for unit in range(run.start, run.start + run.num_units)}
        cached = set(self._cached)
        referenced = set(self.referenced())
        listed = self.index.block_ids()
        assert min(self._num_refs) >= 0, f"a block has {min(self._num_refs)} references"
        assert not free & cached, f"blocks {free & cached} are free and cached"
        assert not (free | cached) & referenced, f"blocks {(free | cached) & referenced} are free or cached, and referenced"
        num_known = len(free) + len(cached) + len(referenced)
        assert num_known == self.num_blocks, f"{num_known} blocks are free, cached or referenced, of {self.num_blocks}"
        assert cached <= listed, f"blocks {cached - listed} are cached, but not in the index"
        assert not listed & free, f"blocks {listed & free} are free and in the index"
        num_shared = sum(num_refs > 1 for num_refs in self._num_refs)
        assert num_shared == self.num_shared, f"{num_shared} blocks are shared, counted {self.num_shared}"
        for block, key in self._unsaved.items():
            assert self.index.key_of(block) == key, f"block {block} waits for a save under a key that it is not listed under"

    def _evict(self, block_ids: list[BlockId]) -> None:
        """Cached blocks, which become free. Neighbours are freed together: a request may wait for a thousand of them."""
        for block_id in block_ids:
            del self._cached[block_id]
            self.index.remove(block_id)
            self._unsaved.pop(block_id, None)
        block_ids = sorted(block_ids)
        start = 0
        for end in range(1, len(block_ids) + 1):
            if end == len(block_ids) or block_ids[end] != block_ids[end - 1] + 1:
                self._buddy.free(block_ids[start], end - start)
                start = end
