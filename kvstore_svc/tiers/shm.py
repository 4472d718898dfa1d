"""The first tier: blocks in memfd slabs that clients map. Joins the index (core) to the bytes (common/shm).

Knows places and bytes. Does not know gRPC, tickets or lower tiers.
"""

import secrets

from common.errors import StartupError
from common.ids import Epoch
from common.shm.attachment import SlabOffer
from common.shm.available_memory import available_memory_bytes
from common.shm.checksum import checksum
from common.shm.slab import MIN_SLAB_BYTES, PAGE_BYTES, OwnedSlab, create_slab
from kvstore_svc.core.block import Block
from kvstore_svc.core.block_store import MAX_EVENTS, BlockStore
from kvstore_svc.core.place import Place, PlaceTable
from kvstore_svc.tiers.base import StoredBlock, TierCounts

# The kernel does not refuse memory that it does not have: it kills a process. So what is asked for must be there, with some
# left for everybody else.
_SHARE_OF_AVAILABLE = 0.9


class ShmTier:
    """Slabs and the index over them.

    Attributes:
        name: "shm".
        store: the index.
    """

    name = "shm"

    def __init__(
        self, slabs: list[OwnedSlab], epoch: Epoch, *, session_ttl_s: float, quarantine_s: float, max_events: int = MAX_EVENTS
    ):
        self._slabs = slabs
        self.places = PlaceTable([owned.slab.generations for owned in slabs], PAGE_BYTES)
        self.store = BlockStore(self.places, epoch, session_ttl_s=session_ttl_s, quarantine_s=quarantine_s, max_events=max_events)

    @property
    def fds(self) -> list[int]:
        """Descriptors of the slabs, by slab id."""
        return [owned.fd for owned in self._slabs]

    def offers(self) -> list[SlabOffer]:
        """What clients are told of the slabs."""
        headers = [owned.slab.header for owned in self._slabs]
        return [SlabOffer(header.slab_id, header.size_bytes, header.nonce) for header in headers]

    def view(self, block: Block) -> memoryview:
        """The bytes of a block, writable."""
        return self._slabs[block.place.slab_id].slab.view(block.place.start_page, block.layout.block_bytes)

    def offset_bytes(self, place: Place) -> int:
        """Where a place begins, counted from the start of its slab."""
        return self._slabs[place.slab_id].slab.header.data_offset + place.start_page * PAGE_BYTES

    def measure(self, blocks: list[Block]) -> list[bytes]:
        """Checksums of the bytes that are there now. Slow and free of shared state: call it from a thread."""
        return [checksum(self.view(block)) for block in blocks]

    def stored(self, block: Block) -> StoredBlock:
        """What a lower tier keeps beside the bytes."""
        return StoredBlock(block.key, block.layout, block.checksum)

    def counts(self) -> TierCounts:
        """For GetStats."""
        counts, places = self.store.counts, self.places
        return TierCounts(
            capacity_bytes=places.capacity_bytes,
            used_bytes=places.capacity_bytes - places.free_bytes,
            num_blocks=self.store.num_blocks,
            num_hits=counts.num_hits,
            num_misses=counts.num_misses,
            num_evictions=counts.num_evictions,
            num_writes=counts.num_writes,
        )

    def close(self) -> None:
        """Closes the descriptors; clients keep what they have mapped."""
        for owned in self._slabs:
            owned.close()


def create_slabs(capacity_bytes: int, slab_bytes: int, epoch: Epoch) -> list[OwnedSlab]:
    """Slabs of slab_bytes, the last one maybe smaller, that have capacity_bytes in all.

    Raises:
        StartupError: the machine or a control group does not have the memory.
    """
    available_bytes = int(available_memory_bytes() * _SHARE_OF_AVAILABLE)
    if capacity_bytes > available_bytes:
        raise StartupError(
            f"shared memory for blocks: {capacity_bytes} bytes wanted, {available_bytes} are to be had; lower --capacity-bytes"
        )
    slabs: list[OwnedSlab] = []
    remaining = capacity_bytes // PAGE_BYTES * PAGE_BYTES
    try:
        while remaining >= MIN_SLAB_BYTES:
            size_bytes = min(remaining, slab_bytes // PAGE_BYTES * PAGE_BYTES)
            slabs.append(create_slab(len(slabs), size_bytes, epoch=epoch, nonce=secrets.randbits(64)))
            remaining -= size_bytes
    except StartupError as error:
        for owned in slabs:
            owned.close()
        raise StartupError(f"shared memory for blocks: {capacity_bytes} bytes wanted: {error.message}") from error
    return slabs
