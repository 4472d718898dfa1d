"""The disk tier: blocks in slots of preallocated files. Joins the table of slots (core) to files, threads and time.

Knows keys, files and when something is durable. Does not know shared memory, leases or gRPC.

A put writes header and bytes with one call and is done; a flush that follows makes it durable: the segment is synced, then
the index is told and synced. A block is durable when a flush that began after its put has ended: from then on it is there
after a crash or a loss of power, until it is evicted or dropped. What a crash leaves of others is found out when it is read:
the header must be the one that the table expects, the bytes must have its checksum.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from common.clock import Clock
from common.degraded import DegradedPaths
from common.ids import BlockKey
from common.shm.checksum import checksum
from kvstore_svc.core.block import Layout
from kvstore_svc.core.disk_record import DiskRecord
from kvstore_svc.core.slot import DiskBlock, Lack
from kvstore_svc.tiers.base import FoundBlock, StoredBlock, TierCounts
from kvstore_svc.tiers.disk_device import PAUSE_S, DiskDevice
from kvstore_svc.tiers.disk_folder import DiskFolder, DiskUnavailable, reason_of
from kvstore_svc.tiers.disk_recovery import recover
from kvstore_svc.tiers.disk_segment import SegmentFile

log = logging.getLogger(__name__)
FLUSH_DELAY_S = 0.1
# Nothing useful fits into less.
_MIN_CAPACITY_BYTES = 16 << 20


class DiskTier:
    """See the module's first lines, and LowerTier.

    Args:
        folder: ours alone.
        capacity_bytes: of all segment files together.
        segment_bytes: size of each, about.
        clock: for pauses after failures.
        degraded: counts kvstore_disk and kvstore_disk_full.

    Attributes:
        num_scanned_segments: those whose headers had to be read at the start.
        segment_type: of new segments.
    """

    name = "disk"

    def __init__(self, folder: DiskFolder, *, capacity_bytes: int, segment_bytes: int, clock: Clock, degraded: DegradedPaths):
        """Finds what is there.

        Raises:
            DiskUnavailable: the folder cannot be read or written.
        """
        self._folder = folder
        self._clock = clock
        self._degraded = degraded
        recovered = recover(folder.path, capacity_bytes, segment_bytes)
        self.num_scanned_segments = recovered.num_scanned
        self._table = recovered.table
        # Of blocks that are written from now on nobody else can have changed a header.
        self._first_sequence = self._table.next_sequence
        self._files = recovered.files
        self._index = recovered.index
        self.segment_type: type[SegmentFile] = SegmentFile
        self._device = DiskDevice(folder.path, clock, degraded)
        self._grow_again_at_s: float | None = None
        # Held by whoever adds or removes segments, and by whoever syncs them.
        self._shape = asyncio.Lock()
        # What the index has not been told yet, and blocks of which nobody knows yet that they are durable.
        self._records: list[DiskRecord] = []
        self._written: list[DiskBlock] = []
        self._is_index_stale = False
        self._flusher: asyncio.Task[None] | None = None
        self._num_hits = self._num_misses = self._num_writes = self._num_bad = 0
        self._read_bytes = self._written_bytes = 0
        self._read_s = self._written_s = 0.0

    # LowerTier

    async def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See LowerTier."""
        if self._device.is_off:
            return [False] * len(keys)
        return [self._table.contains(key) for key in keys]

    async def get(self, key: BlockKey, into: memoryview) -> FoundBlock | None:
        """See LowerTier. The header is compared here, the checksum of the bytes taken here and compared by the caller."""
        block = None if self._device.is_off else self._table.begin_read(key)
        if block is None:
            self._num_misses += 1
            return None
        try:
            if block.layout.block_bytes != into.nbytes:
                self._num_misses += 1
                return None
            found = await self._read(block, into)
        finally:
            self._table.end_read(block)
        self._num_hits += found is not None
        self._num_misses += found is None
        return found

    async def put(self, block: StoredBlock, data: memoryview) -> bool:
        """See LowerTier."""
        if self._device.is_off:
            return False
        if self._grow_again_at_s is not None and self._clock.now() >= self._grow_again_at_s:
            self._grow_again_at_s = None
            self._table.resume_growth()
        taken = await self._slot_for(block)
        if isinstance(taken, Lack):
            return taken is Lack.PRESENT
        is_written = False
        try:
            file, started_s = self._files[taken.record.segment_id], time.perf_counter()
            await self._device.transfer(file.write, taken.record.slot, taken.record.pack(), data)
            self._written_s += time.perf_counter() - started_s
            is_written = True
        except OSError:
            return False
        finally:
            self._table.end_write(taken, is_written=is_written)
        self._num_writes += 1
        self._written_bytes += data.nbytes
        self._records.append(taken.record)
        self._written.append(taken)
        self._flush_soon()
        return True

    async def evict(self, key: BlockKey) -> bool:
        """See LowerTier. The caller has found its bytes to be wrong."""
        block = self._table.block(key)
        if block is None:
            return False
        self._num_bad += 1
        await self._drop(block)
        return True

    async def clear(self, fingerprint: bytes | None) -> int:
        """See LowerTier. What was dropped is gone from the disk for good when this returns: files, headers and index."""
        async with self._shape:
            dropped = self._table.readable(fingerprint)
            self._records += [self._table.drop(block) for block in dropped]
            by_segment: dict[int, list[DiskBlock]] = {segment_id: [] for segment_id in self._files}
            for block in dropped:
                by_segment[block.record.segment_id].append(block)
            for segment_id, blocks in by_segment.items():
                await self._wipe_segment(segment_id, blocks)
        await self.flush()
        return len(dropped)

    def counts(self) -> TierCounts:
        """See LowerTier."""
        table = self._table
        return TierCounts(
            capacity_bytes=table.capacity_bytes,
            used_bytes=table.used_bytes,
            num_blocks=table.num_blocks,
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_evictions=table.num_evictions,
            num_writes=self._num_writes,
            num_bad=self._num_bad,
            unavailable_reason=self._device.unavailable_reason,
        )

    # Durability

    async def flush(self) -> bool:
        """Makes all that was put before durable; False: it is not."""
        async with self._shape:
            records, self._records = self._records, []
            blocks, self._written = self._written, []
            if not (records or self._is_index_stale):
                return True
            fresh: list[DiskRecord] | None = None
            if self._is_index_stale or self._index.is_long(self._table.num_blocks):
                fresh = [block.record for block in self._table.readable()]
            files = {block.record.segment_id: self._files.get(block.record.segment_id) for block in blocks}
            is_synced = False
            # Unless all goes well, the index lacks these records for good: it is written anew then.
            self._is_index_stale = True
            try:
                await self._device.run(_sync_all, [file for file in files.values() if file is not None])
                is_synced = True
                if fresh is None:
                    await self._device.run(self._index.append, records)
                else:
                    await self._device.run(self._index.rewrite, fresh)
            except OSError as error:
                self._device.failed(error)
                return False
            else:
                self._is_index_stale = False
            finally:
                if not is_synced:
                    # The kernel reports a lost write once: a later sync that succeeds says nothing of these blocks.
                    for block in blocks:
                        block.is_suspect = True
                elif self._is_index_stale:
                    self._written = [block for block in blocks if self._table.block(block.key) is block] + self._written
        for block in blocks:
            block.is_durable = not block.is_suspect
        return True

    def is_durable(self, key: BlockKey) -> bool:
        """Whether a crash or a loss of power would leave the block."""
        block = self._table.block(key)
        return block is not None and block.is_durable

    def layouts(self) -> dict[Layout, int]:
        """How many blocks there are of each layout."""
        found: dict[Layout, int] = {}
        for block in self._table.readable():
            found[block.layout] = found.get(block.layout, 0) + 1
        return found

    def blocks(self, fingerprint: bytes | None) -> list[StoredBlock]:
        """All blocks of a layout, or of all, in the order in which they lie on the disk."""
        readable = sorted(self._table.readable(fingerprint), key=lambda b: (b.record.segment_id, b.record.slot))
        return [StoredBlock(block.key, block.layout, block.record.checksum) for block in readable]

    async def close(self) -> None:
        """Makes everything durable and gives the folder back."""
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.gather(self._flusher, return_exceptions=True)
        await self.flush()
        self._device.close()
        self._index.close()
        for file in self._files.values():
            file.close()
        self._folder.close()

    def check_integrity(self) -> None:
        """Raises AssertionError unless the table is sound and each of its segments is open."""
        self._table.check_integrity()
        assert sorted(self._files) == sorted(self._table.segment_ids)

    # Inside

    async def _read(self, block: DiskBlock, into: memoryview) -> FoundBlock | None:
        record, started_s = block.record, time.perf_counter()
        try:
            header, measured = await self._device.transfer(_read_and_hash, self._files[record.segment_id], record.slot, into)
        except OSError:
            await self._drop(block)
            return None
        found = DiskRecord.unpack(header)
        if found != record:
            if self._table.block(record.key) is block:  # else it was dropped meanwhile, and its header wiped
                # After a crash the index may be behind: the slot was wiped or written again since. That is no fault of the disk.
                is_later = record.sequence < self._first_sequence and (
                    not any(header) or (found is not None and found.sequence > record.sequence)
                )
                if not is_later:
                    log.error("block %s is not where the disk tier left it; dropped", record.key.hex())
                    self._num_bad += 1
                await self._drop(block)
            return None
        self._read_s += time.perf_counter() - started_s
        self._read_bytes += into.nbytes
        return FoundBlock(StoredBlock(record.key, record.layout, record.checksum), measured)

    async def _drop(self, block: DiskBlock) -> None:
        """Forgets a block and wipes its header, so that no later start finds it."""
        if self._table.block(block.key) is not block:
            return
        self._records.append(self._table.drop(block))
        try:
            await self._device.run(self._files[block.record.segment_id].wipe, [block.record.slot])
        except OSError as error:
            self._device.failed(error)
        finally:
            self._table.free_dropped(block)
        self._flush_soon()

    async def _wipe_segment(self, segment_id: int, dropped: list[DiskBlock]) -> None:
        """Removes a segment that has nothing but dropped blocks; else wipes their headers, and those of free slots."""
        if self._table.has_only(segment_id, dropped):
            for block in dropped:
                self._table.free_dropped(block)
            self._table.retire(segment_id)
            await self._remove(self._files.pop(segment_id))
            return
        free = self._table.take_free(segment_id)
        try:
            await self._device.run(self._files[segment_id].wipe, [*free, *(block.record.slot for block in dropped)])
        except OSError as error:
            self._device.failed(error)
        finally:
            self._table.give_free(segment_id, free)
            for block in dropped:
                self._table.free_dropped(block)

    async def _slot_for(self, stored: StoredBlock) -> DiskBlock | Lack:
        """A slot, in a new segment if need be."""
        taken = self._table.begin_write(stored.key, stored.layout, stored.checksum)
        if taken not in (Lack.GROWTH, Lack.RETIREMENT):
            return taken
        async with self._shape:
            while True:
                taken = self._table.begin_write(stored.key, stored.layout, stored.checksum)
                if taken is Lack.GROWTH:
                    await self._grow(stored.layout)
                elif taken is Lack.RETIREMENT:
                    segment_id = self._table.segment_to_retire(stored.layout)
                    assert segment_id is not None, "the table has just seen one"
                    num_lost = self._table.retire(segment_id)
                    log.info("disk tier: segment %d with %d blocks of another layout gives way", segment_id, num_lost)
                    await self._remove(self._files.pop(segment_id))
                else:
                    return taken

    async def _grow(self, layout: Layout) -> None:
        segment_id, size, num_slots = self._table.new_segment(layout)
        try:
            file = await self._device.run(self.segment_type.create, self._folder.path, segment_id, size, num_slots)
        except OSError as error:
            reason = f"{self._folder.path}: no segment of {size * num_slots} bytes: {reason_of(error)}"
            self._degraded.note("kvstore_disk_full", reason)
            self._table.stop_growth()
            self._grow_again_at_s = self._clock.now() + PAUSE_S
            return
        self._degraded.clear("kvstore_disk_full")
        self._files[segment_id] = file
        self._table.add_segment(segment_id, size, file.num_slots)

    async def _remove(self, file: SegmentFile) -> None:
        try:
            await self._device.run(file.remove)
        except OSError as error:
            self._device.failed(error)

    def _flush_soon(self) -> None:
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush_later())

    async def _flush_later(self) -> None:
        """One flush for all that is put within a moment; again after a pause while it fails."""
        delay_s = FLUSH_DELAY_S
        while self._records or self._is_index_stale:
            await asyncio.sleep(delay_s)
            delay_s = FLUSH_DELAY_S if await self.flush() else PAUSE_S


def open_disk_tier(
    path: Path, owner: str, *, capacity_bytes: int | None, segment_bytes: int, clock: Clock, degraded: DegradedPaths
) -> DiskTier:
    """Takes a folder and finds what is in it.

    Args:
        path: of the folder; created if need be.
        owner: where this store listens.
        capacity_bytes: None: the default, see DiskFolder.
        segment_bytes: see DiskTier.
        clock: see DiskTier.
        degraded: see DiskTier.

    Raises:
        StartupError: another store has the folder, or a newer version wrote it.
        DiskUnavailable: it cannot be used now.
    """
    folder = DiskFolder(path, owner)
    try:
        if capacity_bytes is None:
            capacity_bytes = folder.default_capacity_bytes()
            if capacity_bytes < _MIN_CAPACITY_BYTES:
                raise DiskUnavailable(f"{path}: no space left")
        return DiskTier(folder, capacity_bytes=capacity_bytes, segment_bytes=segment_bytes, clock=clock, degraded=degraded)
    except OSError as error:
        folder.close()
        raise DiskUnavailable(f"{path}: {reason_of(error)}") from error
    except BaseException:
        folder.close()
        raise


def _read_and_hash(file: SegmentFile, slot: int, into: memoryview) -> tuple[bytes, bytes]:
    """A slot's header, and the checksum of the bytes that were read."""
    header = file.read(slot, into)
    return header, checksum(into)


def _sync_all(files: Sequence[SegmentFile]) -> None:
    for file in files:
        file.sync()
