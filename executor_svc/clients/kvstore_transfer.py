"""How block bytes get into the store and out of it, in one session: through shared memory or inline.

Knows the store's calls and how bytes are verified. Does not know sessions' lives: an error of a call is passed on.
One call covers many blocks, because a call costs as much as copying several hundred KiB.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import grpc
import numpy as np

from common.errors import OctavoError
from common.ids import BlockKey
from common.patience import Patience
from common.rpc.status import from_rpc_error
from common.shm.attachment import Attachment
from common.shm.checksum import checksum
from executor_svc.clients.call_deadline import CallDeadline
from executor_svc.clients.kvstore_report import OUT_OF_TIME, LoadReport
from executor_svc.clients.kvstore_session import CALL_TIMEOUT_S, StoreSession
from octavo.kvstore.v1 import kv_store_service_pb2 as pb

Blocks = Sequence[tuple[BlockKey, memoryview]]
Statuses = list["pb.BlockStatus.ValueType"]
CORRUPT = "bytes differ from their checksum"
_TIER_NAMES = {pb.TIER_SHM: "shm", pb.TIER_DISK: "disk", pb.TIER_REDIS: "redis"}
# The store answers before the client gives up on it, so that a slow tier costs a miss and not the call.
_SHARE_OF_TIMEOUT = 0.8
_INLINE_TIMEOUT_S = 30.0


class Transfer(Protocol):
    """One of the two ways."""

    def save(self, blocks: Blocks) -> Statuses:
        """Writes blocks; one status each. Raises grpc.RpcError."""
        ...

    def load(self, blocks: Blocks, patience: Patience) -> LoadReport:
        """Reads leading blocks and verifies them. Raises grpc.RpcError if the store failed before the first was there."""
        ...


def transfer_of(session: StoreSession) -> Transfer:
    """The way that a session goes."""
    return ShmTransfer(session, session.attachment) if session.attachment is not None else InlineTransfer(session)


class ShmTransfer:
    """Handles travel by gRPC, bytes by copies between the buffers and the slabs."""

    def __init__(self, session: StoreSession, attachment: Attachment):
        self._session = session
        self._attachment = attachment

    def save(self, blocks: Blocks) -> Statuses:
        """See Transfer."""
        session = self._session
        reserved = session.stub.ReserveBlocks(
            pb.ReserveBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=[key for key, _ in blocks]),
            timeout=CALL_TIMEOUT_S,
            metadata=session.metadata,
        )
        statuses = [result.status for result in reserved.results]
        commits: list[pb.Commit] = []
        positions: list[int] = []
        for result in reserved.results:
            if result.status == pb.BLOCK_STATUS_OK:
                handle, data = result.handle, blocks[result.key_index][1]
                _copy(self._view(handle, data.nbytes), data)
                commits.append(pb.Commit(lease_id=handle.lease_id, generation=handle.generation, checksum=checksum(data)))
                positions.append(result.key_index)
        if commits:
            committed = session.stub.CommitBlocks(
                pb.CommitBlocksRequest(session_id=session.session_id, epoch=session.epoch, commits=commits),
                timeout=CALL_TIMEOUT_S,
                metadata=session.metadata,
            )
            for position, status in zip(positions, committed.statuses, strict=True):
                statuses[position] = status
        return statuses

    def load(self, blocks: Blocks, patience: Patience) -> LoadReport:
        """See Transfer."""
        session = self._session
        request = pb.AcquireBlocksRequest(
            session_id=session.session_id, epoch=session.epoch, keys=[key for key, _ in blocks], prefix_only=True
        )
        _set_patience(request, patience)
        release = pb.ReleaseBlocksRequest(session_id=session.session_id, epoch=session.epoch)
        report = LoadReport()
        try:
            with CallDeadline(session.stub.AcquireBlocks(request, metadata=session.metadata), patience) as deadline:
                for response in deadline.responses():
                    for result in response.results:
                        if result.status != pb.BLOCK_STATUS_OK:
                            continue
                        release.lease_ids.append(result.handle.lease_id)
                        if report.reason or deadline.is_over:
                            continue
                        report.reason = self._read(result, blocks[result.key_index][1])
                        if not report.reason:
                            report.add(_TIER_NAMES[result.tier], deadline.extend())
                        elif report.reason == CORRUPT:
                            release.suspect_lease_ids.append(result.handle.lease_id)
            _note_end(report, deadline, len(blocks))
            if release.lease_ids and not deadline.was_cancelled:  # else the store has taken them back
                session.stub.ReleaseBlocks(release, timeout=CALL_TIMEOUT_S, metadata=session.metadata)
        except grpc.RpcError as error:
            _keep_or_raise(session, report, error)
        return report

    def _read(self, result: pb.BlockResult, into: memoryview) -> str:
        """Copies one block and verifies the copy; returns what is wrong with it, or nothing."""
        handle = result.handle
        _copy(into, self._view(handle, into.nbytes))
        if not self._attachment.has_generation(handle.slab_id, handle.offset_bytes, handle.length_bytes, handle.generation):
            return "the block's place was given to another block"
        return "" if checksum(into) == handle.checksum else CORRUPT

    def _view(self, handle: pb.BlockHandle, num_bytes: int) -> memoryview:
        view = self._attachment.view(handle.slab_id, handle.offset_bytes, handle.length_bytes)
        if view is None or handle.length_bytes != num_bytes:
            raise OctavoError(
                f"the store sent a handle of {handle.length_bytes} bytes at {handle.offset_bytes}, wanted {num_bytes}"
            )
        return view


class InlineTransfer:
    """Bytes travel by gRPC in chunks."""

    def __init__(self, session: StoreSession):
        self._session = session

    def save(self, blocks: Blocks) -> Statuses:
        """See Transfer. Asks first how many of the leading blocks are there, because sending is what costs."""
        session = self._session
        found = session.stub.LookupBlocks(
            pb.LookupBlocksRequest(keys=[key for key, _ in blocks]), timeout=CALL_TIMEOUT_S, metadata=session.metadata
        )
        statuses: Statuses = [pb.BLOCK_STATUS_PRESENT] * len(found.tiers)
        if len(statuses) < len(blocks):
            chunks = self._chunks(blocks[len(statuses) :])
            statuses += session.stub.PutBlocks(chunks, timeout=_INLINE_TIMEOUT_S, metadata=session.metadata).statuses
        return statuses

    def load(self, blocks: Blocks, patience: Patience) -> LoadReport:
        """See Transfer."""
        session = self._session
        request = pb.GetBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=[key for key, _ in blocks])
        _set_patience(request, patience)
        report = LoadReport()
        num_bytes, expected, tier = 0, b"", ""
        try:
            with CallDeadline(session.stub.GetBlocks(request, metadata=session.metadata), patience) as deadline:
                for chunk in deadline.responses():
                    if chunk.status != pb.BLOCK_STATUS_OK or deadline.is_over:
                        break
                    into = blocks[chunk.key_index][1].cast("B")
                    if chunk.block_bytes:
                        num_bytes, expected, tier = 0, chunk.checksum, _TIER_NAMES[chunk.tier]
                    end = num_bytes + len(chunk.data)
                    if end > into.nbytes:
                        raise OctavoError(f"the store sent more than the {into.nbytes} bytes of a block")
                    into[num_bytes:end] = chunk.data
                    num_bytes = end
                    if num_bytes == into.nbytes:
                        if checksum(into) != expected:
                            report.reason = CORRUPT
                            break
                        report.add(tier, deadline.extend())
            _note_end(report, deadline, len(blocks))
        except grpc.RpcError as error:
            _keep_or_raise(session, report, error)
        return report

    def _chunks(self, blocks: Blocks) -> Iterator[pb.PutBlocksRequest]:
        session = self._session
        for key, data in blocks:
            flat = data.cast("B")
            for start in range(0, len(flat), session.inline_chunk_bytes):
                chunk = pb.PutBlocksRequest(session_id=session.session_id, epoch=session.epoch)
                chunk.data = bytes(flat[start : start + session.inline_chunk_bytes])
                if start == 0:
                    chunk.key, chunk.block_bytes, chunk.checksum = key, len(flat), checksum(flat)
                yield chunk


def _copy(into: memoryview, data: memoryview) -> None:
    """At memory speed; numpy lets other threads run meanwhile."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


def _set_patience(request: pb.AcquireBlocksRequest | pb.GetBlocksRequest, patience: Patience) -> None:
    request.max_wait.FromMicroseconds(max(0, int(1e6 * patience.first_s * _SHARE_OF_TIMEOUT)))
    request.max_wait_per_block.FromMicroseconds(int(1e6 * patience.per_block_s))


def _note_end(report: LoadReport, deadline: CallDeadline, num_blocks: int) -> None:
    """What is to be said of the block that did not come, if one did not."""
    if report.num_loaded < num_blocks and report.reason != CORRUPT:
        report.waited(deadline.waited_s)
        report.reason = report.reason or (OUT_OF_TIME if deadline.is_over else "")


def _keep_or_raise(session: StoreSession, report: LoadReport, error: grpc.RpcError) -> None:
    """What is verified stays loaded though the session has failed; a failure before the first block is the caller's."""
    if report.num_loaded == 0:
        raise error
    session.has_ended.set()
    report.reason = report.reason or from_rpc_error(error).message
