"""A client's view of a store's slabs: mapped once per session, checked against what the store announced.

Knows slabs and the socket that keeps the session alive. Does not know gRPC, keys or leases.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import NoSharedMemory
from common.shm.handover import Handover, HandoverRequest, fetch_descriptors
from common.shm.slab import PAGE_BYTES, Slab

_CELL = struct.Struct("<Q")


@dataclass(frozen=True)
class SlabOffer:
    """One slab as the store announced it."""

    slab_id: int
    size_bytes: int
    nonce: int


class SlabUser(Protocol):
    """Somebody who prepares mapped slabs for whatever copies their bytes. Both calls return at once, on any thread."""

    def slabs_mapped(self, slabs: Sequence[Slab]) -> None:
        """These are in use from now on."""
        ...

    def slabs_unmapped(self, slabs: Sequence[Slab]) -> None:
        """They are in use no more: let go of them, so that they can be unmapped. Unknown ones are fine."""
        ...


class Attachment:
    """Mapped slabs. Confined to one thread, but for unmap. A slab stays mapped as long as a view of it is in use."""

    def __init__(self, handover: Handover, slabs: dict[int, Slab], user: SlabUser | None = None):
        """Takes them over.

        Args:
            handover: the socket that keeps the session alive.
            slabs: by slab_id.
            user: told of the slabs now and when they are unmapped.
        """
        self._handover = handover
        self._slabs = slabs
        self._user = user
        if user is not None:
            user.slabs_mapped(list(slabs.values()))

    @classmethod
    def open(
        cls,
        socket_path: str,
        request: HandoverRequest,
        offers: Sequence[SlabOffer],
        *,
        epoch: int,
        timeout_s: float,
        user: SlabUser | None = None,
    ) -> "Attachment":
        """Fetches, maps and checks all slabs.

        Raises:
            NoSharedMemory: with the reason; nothing stays open.
        """
        handover = fetch_descriptors(socket_path, request, num_slabs=len(offers), timeout_s=timeout_s)
        try:
            slabs = {}
            for offer, fd in zip(offers, handover.fds, strict=True):
                slab = Slab(fd, offer.size_bytes)
                header = slab.header
                if (header.slab_id, header.nonce, header.epoch) != (offer.slab_id, offer.nonce, epoch) or handover.epoch != epoch:
                    raise NoSharedMemory(f"slab {offer.slab_id} at {socket_path} belongs to another store")
                slabs[offer.slab_id] = slab
        except OSError as error:
            handover.connection.close()
            raise NoSharedMemory(f"cannot map slabs of {socket_path}: {error}") from error
        except NoSharedMemory:
            handover.connection.close()
            raise
        finally:
            handover.close_descriptors()
        return cls(handover, slabs, user)

    def view(self, slab_id: int, offset_bytes: int, length_bytes: int) -> memoryview | None:
        """The bytes of a handle, writable; None: the handle points outside of the slabs' data."""
        slab = self._slabs.get(slab_id)
        if slab is None or offset_bytes < slab.header.data_offset:
            return None
        start = offset_bytes - slab.header.data_offset
        if start + length_bytes > len(slab.data):
            return None
        return slab.data[start : start + length_bytes]

    def has_generation(self, slab_id: int, offset_bytes: int, length_bytes: int, generation: int) -> bool:
        """Whether every page of a handle's place still belongs to the place that the handle was made for."""
        slab = self._slabs.get(slab_id)
        if slab is None:
            return False
        start_page = (offset_bytes - slab.header.data_offset) // PAGE_BYTES
        num_pages = -(-length_bytes // PAGE_BYTES)
        cells = slab.generations[start_page : start_page + num_pages]
        return cells.tobytes() == _CELL.pack(generation) * num_pages  # a tenth of the time of a comparison by numpy

    def unmap(self) -> None:
        """Gives no more views, so that the memory of a dead store can go. May be called from any thread."""
        slabs, self._slabs = self._slabs, {}
        if self._user is not None:
            self._user.slabs_unmapped(list(slabs.values()))

    def close(self) -> None:
        """Closes the socket, which tells the store that this client reads and writes no more, and unmaps."""
        self.unmap()
        self._handover.connection.close()
