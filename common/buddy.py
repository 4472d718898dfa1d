"""A buddy allocator of numbered units: runs split and merged in powers of two. Knows numbers, not what the units hold.

Free space is kept as chunks: 2**k units whose start is a multiple of 2**k. Two chunks of one size that differ in bit k of
their start are buddies; when both are free they become one chunk of the next size, so that freed space grows back into long
runs by itself. Any number of units may be managed: what is no power of two begins as several chunks.

An allocation may have any length. It takes the smallest chunk that holds it, the lowest in address among those, and gives
the tail back. Allocations are not remembered one by one: any part of what is allocated may be freed.
"""

import heapq
import re
from collections.abc import Iterator
from typing import NamedTuple

_NO_CHUNK = 255
_FREE_RUN = re.compile(rb"\0+")


class Run(NamedTuple):
    """Units start, start + 1, ... start + num_units - 1."""

    start: int
    num_units: int


class BuddyAllocator:
    """See the module's first lines. One unit costs O(log num_units) at most, in any operation.

    Args:
        num_units: how many units there are, numbered from 0; all free at first.

    Raises:
        ValueError: fewer than one unit.
    """

    def __init__(self, num_units: int):
        if num_units < 1:
            raise ValueError(f"num_units is {num_units}, must be at least 1")
        self.num_units = num_units
        self.num_free_units = 0
        self._allocated = bytearray(b"\1") * num_units
        # Order of the free chunk that starts at a unit.
        self._order_at = bytearray([_NO_CHUNK]) * num_units
        num_orders = num_units.bit_length()
        self._num_chunks = [0] * num_orders
        # Starts of free chunks by order, lowest first. Chunks that were merged or carved away leave stale entries behind.
        self._starts: list[list[int]] = [[] for _ in range(num_orders)]
        self.free(0, num_units)

    def allocate(self, num_units: int = 1) -> int | None:
        """Takes one contiguous run.

        Returns:
            Its start; None: no run of that length is free.

        Raises:
            ValueError: fewer than one unit.
        """
        if num_units < 1:
            raise ValueError(f"num_units is {num_units}, must be at least 1")
        if num_units > self.num_free_units:
            return None
        if num_units == 1 and self._num_chunks[0]:
            return self._take_single()
        for order in range((num_units - 1).bit_length(), len(self._num_chunks)):
            if self._num_chunks[order]:
                start = self._lowest(order)
                self._take_head(start, order, num_units)
                return start
        # No chunk is long enough, but neighbours that are no buddies may be together.
        start = self._allocated.find(bytes(num_units))
        if start < 0:
            return None
        self._carve(start, num_units)
        return start

    def allocate_at(self, start: int, num_units: int = 1) -> bool:
        """Takes these very units, for example those right behind what the caller has already.

        Returns:
            False: they are not all free, or reach beyond the last unit.

        Raises:
            ValueError: a negative start, or fewer than one unit.
        """
        if start < 0 or num_units < 1:
            raise ValueError(f"units from {start}, {num_units} of them: start must be >= 0, num_units >= 1")
        end = start + num_units
        if end > self.num_units or self._allocated.find(1, start, end) >= 0:
            return False
        self._carve(start, num_units)
        return True

    def allocate_runs(self, num_units: int) -> list[Run] | None:
        """Takes units in few runs: one if possible, else the longest chunks first, joined with their free neighbours.

        Returns:
            Longest first; None: fewer than num_units are free, and nothing was taken.

        Raises:
            ValueError: fewer than one unit.
        """
        start = self.allocate(num_units)
        if start is not None:
            return [Run(start, num_units)]
        if num_units > self.num_free_units:
            return None
        runs = []
        remaining = num_units
        while remaining:
            run = self._take_around_largest(remaining)
            runs.append(run)
            remaining -= run.num_units
        return sorted(runs, key=lambda run: (-run.num_units, run.start))

    def free(self, start: int, num_units: int = 1) -> None:
        """Gives back units, in any cut.

        Raises:
            ValueError: a unit does not exist or is not allocated; nothing was freed.
        """
        end = start + num_units
        if start < 0 or num_units < 1 or end > self.num_units:
            raise ValueError(f"units {start} to {end - 1} cannot be freed: there are units 0 to {self.num_units - 1}")
        already_free = self._allocated.find(0, start, end)
        if already_free >= 0:
            raise ValueError(f"unit {already_free} cannot be freed: it is free already")
        self._allocated[start:end] = bytes(num_units)
        self.num_free_units += num_units
        self._add_chunks(start, end)

    def is_free(self, unit: int) -> bool:
        """Whether a unit is free; units that do not exist are not."""
        return 0 <= unit < self.num_units and not self._allocated[unit]

    def free_runs(self) -> Iterator[Run]:
        """All free units as runs that are as long as possible, in order of address. Costs O(num_units)."""
        for match in _FREE_RUN.finditer(self._allocated):
            yield Run(match.start(), match.end() - match.start())

    @property
    def largest_free_run(self) -> int:
        """Length of the longest free run. Costs O(num_units)."""
        return max((run.num_units for run in self.free_runs()), default=0)

    @property
    def num_free_runs(self) -> int:
        """Number of free runs; 1 means no external fragmentation. Costs O(num_units)."""
        return sum(1 for _ in self.free_runs())

    @property
    def mean_free_run(self) -> float:
        """Mean length of the free runs; 0 if there are none. Costs O(num_units)."""
        num_runs = self.num_free_runs
        return self.num_free_units / num_runs if num_runs else 0.0

    def check_integrity(self) -> None:
        """Raises AssertionError with the values unless chunks cover the free units exactly and no two free buddies are apart."""
        covered = bytearray(b"\1") * self.num_units
        counts = [0] * len(self._num_chunks)
        listed = [set(starts) for starts in self._starts]
        for start, order in enumerate(self._order_at):
            if order == _NO_CHUNK:
                continue
            size = 1 << order
            assert start % size == 0, f"chunk at {start} of order {order} is not aligned"
            assert start + size <= self.num_units, f"chunk at {start} of order {order} is beyond {self.num_units} units"
            assert covered.find(0, start, start + size) < 0, f"chunk at {start} of order {order} overlaps another"
            covered[start : start + size] = bytes(size)
            buddy = start ^ size
            assert buddy >= self.num_units or self._order_at[buddy] != order, (
                f"buddies {start} and {buddy}, order {order}, not merged"
            )
            assert start in listed[order], f"chunk at {start} is not listed under order {order}"
            counts[order] += 1
        assert covered == self._allocated, "free chunks do not cover the free units"
        assert counts == self._num_chunks, f"chunks by order are {counts}, counted {self._num_chunks}"
        assert self._allocated.count(0) == self.num_free_units, f"{self._allocated.count(0)} free, counted {self.num_free_units}"

    def _take_around_largest(self, most: int) -> Run:
        """Takes the longest chunk and free chunks that follow or precede it, no more than most units."""
        order = max(order for order, num_chunks in enumerate(self._num_chunks) if num_chunks)
        start = self._lowest(order)
        end = start + min(1 << order, most)
        while end - start < most and self.is_free(end):
            end += min(1 << self._order_at[end], most - (end - start))
        while end - start < most and self.is_free(start - 1):
            start = max(self._chunk_of(start - 1), end - most)
        self._carve(start, end - start)
        return Run(start, end - start)

    def _take_single(self) -> int:
        """Takes the lowest chunk of one unit; there is one."""
        start = self._lowest(0)
        heapq.heappop(self._starts[0])
        self._num_chunks[0] -= 1
        self._order_at[start] = _NO_CHUNK
        self._allocated[start] = 1
        self.num_free_units -= 1
        return start

    def _take_head(self, start: int, order: int, num_units: int) -> None:
        """Takes the first units of the lowest chunk of its order; what is left of it has no free buddies."""
        heapq.heappop(self._starts[order])
        self._num_chunks[order] -= 1
        self._order_at[start] = _NO_CHUNK
        position, end = start + num_units, start + (1 << order)
        while position < end:  # each piece is as long as its start is aligned
            piece = (position & -position).bit_length() - 1
            self._list_chunk(position, piece)
            position += 1 << piece
        self._allocated[start : start + num_units] = b"\1" * num_units
        self.num_free_units -= num_units

    def _carve(self, start: int, num_units: int) -> None:
        """Takes free units out of the chunks that hold them."""
        end = start + num_units
        position = start
        while position < end:
            chunk = self._chunk_of(position)
            chunk_end = chunk + (1 << self._order_at[chunk])
            self._remove_chunk(chunk)
            if chunk < position:
                self._add_chunks(chunk, position)
            if chunk_end > end:
                self._add_chunks(end, chunk_end)
            position = chunk_end
        self._allocated[start:end] = b"\1" * num_units
        self.num_free_units -= num_units

    def _chunk_of(self, unit: int) -> int:
        """Start of the chunk that holds a free unit."""
        for order in range(len(self._num_chunks)):
            start = unit >> order << order
            if self._order_at[start] == order:
                return start
        raise AssertionError(f"free unit {unit} is in no chunk")

    def _add_chunks(self, start: int, end: int) -> None:
        """Cuts free units into chunks as large as their alignment allows, and merges each with its free buddies."""
        while start < end:
            order = (end - start).bit_length() - 1
            if start:
                order = min(order, (start & -start).bit_length() - 1)
            self._add_chunk(start, order)
            start += 1 << order

    def _add_chunk(self, start: int, order: int) -> None:
        while True:
            buddy = start ^ (1 << order)
            if buddy >= self.num_units or self._order_at[buddy] != order:
                break
            self._remove_chunk(buddy)
            start = min(start, buddy)
            order += 1
        self._list_chunk(start, order)

    def _list_chunk(self, start: int, order: int) -> None:
        self._order_at[start] = order
        self._num_chunks[order] += 1
        starts = self._starts[order]
        heapq.heappush(starts, start)
        if len(starts) > 2 * self._num_chunks[order] + 64:
            starts[:] = sorted({start for start in starts if self._order_at[start] == order})

    def _remove_chunk(self, start: int) -> None:
        self._num_chunks[self._order_at[start]] -= 1
        self._order_at[start] = _NO_CHUNK

    def _lowest(self, order: int) -> int:
        """Start of the lowest chunk of an order that has one."""
        starts = self._starts[order]
        while self._order_at[starts[0]] != order:
            heapq.heappop(starts)
        return starts[0]
