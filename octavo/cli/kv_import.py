"""Blocks of a file into a block store: written inline, in a session for each layout, and made durable. For `octavo kv import`.

Knows batches and what the store answers. Does not know options or how progress is shown.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from octavo.cli.kv_connection import KvStore
from octavo.kv_archive import ArchivedBlock
from octavo.kvstore.v1 import kv_store_admin_service_pb2 as admin_pb
from octavo.kvstore.v1 import kv_store_service_pb2 as pb

_BATCH_BYTES = 32 << 20
_BATCH_BLOCKS = 256
_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 120.0


@dataclass
class Imported:
    """What became of the blocks.

    Attributes:
        num_written: taken by the store, or there already.
        num_rejected: their bytes did not match their checksum.
        num_refused: the store had no room.
        num_durable: of those written, on disk for good.
    """

    num_written: int = 0
    num_rejected: int = 0
    num_refused: int = 0
    num_durable: int = 0


async def import_blocks(store: KvStore, blocks: Iterable[ArchivedBlock], on_bytes: Callable[[int], None]) -> Imported:
    """Writes all of them; on_bytes is called with the bytes of each batch that is done."""
    result = Imported()
    sessions: dict[tuple[bytes, int], pb.OpenSessionResponse] = {}
    try:
        for batch in _batches(blocks):
            layout = (batch[0].fingerprint, len(batch[0].data))
            if layout not in sessions:
                sessions[layout] = await _open(store, *layout)
            await _write(store, sessions[layout], batch, result)
            on_bytes(sum(len(block.data) for block in batch))
    finally:
        for session in sessions.values():
            request = pb.CloseSessionRequest(session_id=session.session_id, epoch=session.epoch)
            await store.blocks.CloseSession(request, timeout=_TIMEOUT_S, metadata=store.metadata)
    return result


async def _open(store: KvStore, fingerprint: bytes, block_bytes: int) -> pb.OpenSessionResponse:
    layout = pb.Layout(fingerprint=fingerprint, block_bytes=block_bytes)
    request = pb.OpenSessionRequest(client_id="octavo kv import", layout=layout, transport=pb.TRANSPORT_INLINE)
    return await store.blocks.OpenSession(request, timeout=_TIMEOUT_S, metadata=store.metadata)


async def _write(store: KvStore, session: pb.OpenSessionResponse, batch: list[ArchivedBlock], result: Imported) -> None:
    answer = await store.blocks.PutBlocks(_chunks(session, batch), timeout=_TIMEOUT_S, metadata=store.metadata)
    there = [
        block.key
        for block, status in zip(batch, answer.statuses, strict=True)
        if status in (pb.BLOCK_STATUS_OK, pb.BLOCK_STATUS_PRESENT)
    ]
    result.num_written += len(there)
    result.num_rejected += sum(status == pb.BLOCK_STATUS_REJECTED for status in answer.statuses)
    result.num_refused += sum(status in (pb.BLOCK_STATUS_FULL, pb.BLOCK_STATUS_BUSY) for status in answer.statuses)
    persisted = await store.admin.PersistBlocks(
        admin_pb.PersistBlocksRequest(keys=there), timeout=_TIMEOUT_S, metadata=store.metadata
    )
    result.num_durable += sum(persisted.durable)


async def _chunks(session: pb.OpenSessionResponse, batch: list[ArchivedBlock]) -> AsyncIterator[pb.PutBlocksRequest]:
    for block in batch:
        for start in range(0, len(block.data), _CHUNK_BYTES):
            chunk = pb.PutBlocksRequest(
                session_id=session.session_id, epoch=session.epoch, data=block.data[start : start + _CHUNK_BYTES]
            )
            if start == 0:
                chunk.key, chunk.block_bytes, chunk.checksum = block.key, len(block.data), block.checksum
            yield chunk


def _batches(blocks: Iterable[ArchivedBlock]) -> Iterable[list[ArchivedBlock]]:
    """Neighbours of one layout, up to a bound."""
    batch: list[ArchivedBlock] = []
    num_bytes = 0
    for block in blocks:
        is_other = bool(batch) and (batch[0].fingerprint, len(batch[0].data)) != (block.fingerprint, len(block.data))
        if batch and (is_other or len(batch) >= _BATCH_BLOCKS or num_bytes + len(block.data) > _BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(block)
        num_bytes += len(block.data)
    if batch:
        yield batch
