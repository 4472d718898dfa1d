"""Where blocks lie: runs of pages in slabs, and the generation of each run. Knows numbers, not bytes.

A generation is drawn once and never again. It is written into the cells of all pages of a place when the place is given
out, and zeroed when it comes back, so that a reader who looks after its copy knows whether it read what it meant to read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.buddy import BuddyAllocator


@dataclass(frozen=True, slots=True)
class Place:
    """Pages start_page ... start_page + num_pages - 1 of a slab."""

    slab_id: int
    start_page: int
    num_pages: int
    generation: int


class PlaceTable:
    """All pages of all slabs.

    Args:
        generations: per slab uint64 [num_pages], written here and never read: clients can write there too.
        page_bytes: bytes of a page.
    """

    def __init__(self, generations: Sequence[npt.NDArray[np.uint64]], page_bytes: int):
        self.page_bytes = page_bytes
        self._generations = generations
        self._allocators = [BuddyAllocator(len(cells)) for cells in generations]
        # The end of the place that was taken last: slab and page.
        self._behind = (0, 0)
        self._next_generation = 1

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all pages."""
        return self.page_bytes * sum(allocator.num_units for allocator in self._allocators)

    @property
    def free_bytes(self) -> int:
        """Bytes of pages that belong to no place."""
        return self.page_bytes * sum(allocator.num_free_units for allocator in self._allocators)

    @property
    def largest_free_run_bytes(self) -> int:
        """Bytes of the longest run of free pages."""
        return self.page_bytes * max(allocator.largest_free_run for allocator in self._allocators)

    @property
    def largest_place_bytes(self) -> int:
        """Bytes of the largest place that an empty store can give out."""
        return self.page_bytes * max(allocator.num_units for allocator in self._allocators)

    def allocate(self, num_bytes: int) -> Place | None:
        """Takes a place of a new generation; None: no slab has a long enough free run.

        Blocks that are written one after the other lie one after the other, as far as there is room: they are read in that order,
        several in one copy. Nor do they waste the tails of buddy chunks: a block of 180 pages leaves 76 of its chunk of 256, in
        which no block of its size fits.
        """
        num_pages = -(-num_bytes // self.page_bytes)
        slab_id, start_page = self._behind
        allocator = self._allocators[slab_id]
        if allocator.num_free_units == allocator.num_units:
            start_page = 0
        if not allocator.allocate_at(start_page, num_pages):
            found = self._take_elsewhere(num_pages)
            if found is None:
                return None
            slab_id, start_page = found
        self._behind = (slab_id, start_page + num_pages)
        place = Place(slab_id, start_page, num_pages, self._next_generation)
        self._next_generation += 1
        self._generations[slab_id][start_page : start_page + num_pages] = place.generation
        return place

    def _take_elsewhere(self, num_pages: int) -> tuple[int, int] | None:
        """In the slab with most room, at its beginning if it is empty."""
        for slab_id in sorted(range(len(self._allocators)), key=lambda i: -self._allocators[i].num_free_units):
            allocator = self._allocators[slab_id]
            if allocator.num_free_units == allocator.num_units and allocator.allocate_at(0, num_pages):
                return slab_id, 0
            start_page = allocator.allocate(num_pages)
            if start_page is not None:
                return slab_id, start_page
        return None

    def free(self, place: Place) -> None:
        """Gives a place back.

        Raises:
            ValueError: it is not allocated.
        """
        self._allocators[place.slab_id].free(place.start_page, place.num_pages)
        self._generations[place.slab_id][place.start_page : place.start_page + place.num_pages] = 0

    def check_integrity(self, places: Sequence[Place]) -> None:
        """Raises AssertionError unless places are disjoint and are all that is allocated."""
        owner: dict[tuple[int, int], Place] = {}
        for place in places:
            for page in range(place.start_page, place.start_page + place.num_pages):
                other = owner.setdefault((place.slab_id, page), place)
                assert other is place, f"{place} and {other} overlap"
        for slab_id, allocator in enumerate(self._allocators):
            allocator.check_integrity()
            for page in range(allocator.num_units):
                is_owned = (slab_id, page) in owner
                assert is_owned != allocator.is_free(page), f"page {page} of slab {slab_id}: owned {is_owned}"
