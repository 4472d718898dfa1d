"""How block bytes get into the store and out of it, in one session: through shared memory or inline.

Knows the store's calls and what makes a block good. Does not know how bytes travel between host memory and the pool
(executor_svc/core/host_block.py), nor sessions' lives: an error of a call is passed on.
One call covers many blocks, because a call costs as much as copying several hundred KiB.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Protocol

import grpc

from common.errors import OctavoError
from common.ids import BlockKey
from common.patience import Patience
from common.rpc.status import from_rpc_error
from common.shm.attachment import Attachment
from executor_svc.clients.call_deadline import CallDeadline
from executor_svc.clients.kvstore_report import OUT_OF_TIME, LoadReport
from executor_svc.clients.kvstore_session import CALL_TIMEOUT_S, StoreSession
from executor_svc.core.host_block import BlockSink, BlockSource, HostBlock
from octavo.kvstore.v1 import kv_store_service_pb2 as pb

Keys = Sequence[BlockKey]
Statuses = list["pb.BlockStatus.ValueType"]
CORRUPT = "bytes differ from their checksum"
_TIER_NAMES = {pb.TIER_SHM: "shm", pb.TIER_DISK: "disk", pb.TIER_REDIS: "redis"}
# The store answers before the client gives up on it, so that a slow tier costs a miss and not the call.
_SHARE_OF_TIMEOUT = 0.8
_INLINE_TIMEOUT_S = 30.0
_RELEASED_AT_ONCE = 64
"""Leases go back while others still come, so many at a time: the store may need the room for blocks from lower tiers."""


class Transfer(Protocol):
    """One of the two ways."""

    def save(self, keys: Keys, source: BlockSource) -> Statuses:
        """Writes blocks; one status each. Raises grpc.RpcError."""
        ...

    def load(self, keys: Keys, sink: BlockSink, patience: Patience) -> LoadReport:
        """Reads leading blocks and verifies them. Raises grpc.RpcError if the store failed before the first was there."""
        ...


def transfer_of(session: StoreSession) -> Transfer:
    """The way that a session goes."""
    return ShmTransfer(session, session.attachment) if session.attachment is not None else InlineTransfer(session)


class ShmTransfer:
    """Handles travel by gRPC, bytes between the slabs and the pool."""

    def __init__(self, session: StoreSession, attachment: Attachment):
        self._session = session
        self._attachment = attachment

    def save(self, keys: Keys, source: BlockSource) -> Statuses:
        """See Transfer."""
        session = self._session
        reserved = session.stub.ReserveBlocks(
            pb.ReserveBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=keys),
            timeout=CALL_TIMEOUT_S,
            metadata=session.metadata,
        )
        statuses = [result.status for result in reserved.results]
        given = [result for result in reserved.results if result.status == pb.BLOCK_STATUS_OK]
        if given:
            places = [HostBlock(result.key_index, self._view(result.handle, source.block_bytes)) for result in given]
            commits = [
                pb.Commit(lease_id=result.handle.lease_id, generation=result.handle.generation, checksum=written)
                for result, written in zip(given, source.write_to(places), strict=True)
            ]
            committed = session.stub.CommitBlocks(
                pb.CommitBlocksRequest(session_id=session.session_id, epoch=session.epoch, commits=commits),
                timeout=CALL_TIMEOUT_S,
                metadata=session.metadata,
            )
            for result, status in zip(given, committed.statuses, strict=True):
                statuses[result.key_index] = status
        return statuses

    def load(self, keys: Keys, sink: BlockSink, patience: Patience) -> LoadReport:
        """See Transfer."""
        session = self._session
        request = pb.AcquireBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=keys, prefix_only=True)
        _set_patience(request, patience)
        release = pb.ReleaseBlocksRequest(session_id=session.session_id, epoch=session.epoch)
        releases: list[grpc.Future[pb.ReleaseBlocksResponse]] = []
        report = LoadReport()
        try:
            with CallDeadline(session.stub.AcquireBlocks(request, metadata=session.metadata), patience) as deadline:
                for response in deadline.responses():
                    held = [result for result in response.results if result.status == pb.BLOCK_STATUS_OK]
                    if held and not report.reason and not deadline.is_over:
                        release.suspect_lease_ids.extend(self._read(held, sink, report, deadline))
                    release.lease_ids.extend(result.handle.lease_id for result in held)
                    if len(release.lease_ids) >= _RELEASED_AT_ONCE:
                        releases.append(self._send(release))
                        release = pb.ReleaseBlocksRequest(session_id=session.session_id, epoch=session.epoch)
            _note_end(report, deadline, len(keys))
            if release.lease_ids:
                releases.append(self._send(release))
            for sent in releases:
                if deadline.was_cancelled:  # who has no time left does not wait for a store that may not answer at all
                    sent.add_done_callback(self._end_unless_done)
                else:
                    sent.result()
        except grpc.RpcError as error:
            _keep_or_raise(session, report, error)
        return report

    def _read(self, held: Sequence[pb.BlockResult], sink: BlockSink, report: LoadReport, deadline: CallDeadline) -> list[int]:
        """Fills the sink from leased blocks, up to the first that is bad or comes too late.

        Nothing reads them any more when it returns. A place's generation is looked at after its bytes were read.

        Returns:
            The leases of blocks whose bytes are wrong.
        """
        blocks = [HostBlock(r.key_index, self._view(r.handle, sink.block_bytes), r.handle.checksum) for r in held]
        suspects: list[int] = []
        with closing(sink.fill(blocks)) as verdicts:
            for result, is_right in zip(held, verdicts, strict=False):
                handle = result.handle
                if not self._attachment.has_generation(
                    handle.slab_id, handle.offset_bytes, handle.length_bytes, handle.generation
                ):
                    report.reason = "the block's place was given to another block"
                elif not is_right:
                    report.reason = CORRUPT
                    suspects.append(handle.lease_id)
                else:
                    report.add(_TIER_NAMES[result.tier], deadline.extend())
                if report.reason or deadline.is_over:
                    break
        return suspects

    def _send(self, release: pb.ReleaseBlocksRequest) -> "grpc.Future[pb.ReleaseBlocksResponse]":
        return self._session.stub.ReleaseBlocks.future(release, timeout=CALL_TIMEOUT_S, metadata=self._session.metadata)

    def _end_unless_done(self, release: "grpc.Future[pb.ReleaseBlocksResponse]") -> None:
        """Leases that were not given back go with their session."""
        if release.cancelled() or release.exception() is not None:
            self._session.has_ended.set()

    def _view(self, handle: pb.BlockHandle, num_bytes: int) -> memoryview:
        view = self._attachment.view(handle.slab_id, handle.offset_bytes, handle.length_bytes)
        if view is None or handle.length_bytes != num_bytes:
            raise OctavoError(
                f"the store sent a handle of {handle.length_bytes} bytes at {handle.offset_bytes}, wanted {num_bytes}"
            )
        return view


class InlineTransfer:
    """Bytes travel by gRPC in chunks, through memory of this process."""

    def __init__(self, session: StoreSession):
        self._session = session

    def save(self, keys: Keys, source: BlockSource) -> Statuses:
        """See Transfer. Asks first how many of the leading blocks are there, because sending is what costs."""
        session = self._session
        found = session.stub.LookupBlocks(pb.LookupBlocksRequest(keys=keys), timeout=CALL_TIMEOUT_S, metadata=session.metadata)
        statuses: Statuses = [pb.BLOCK_STATUS_PRESENT] * len(found.tiers)
        first, size = len(statuses), source.block_bytes
        if first < len(keys):
            memory = memoryview(bytearray((len(keys) - first) * size))
            blocks = [HostBlock(index, memory[(index - first) * size :][:size]) for index in range(first, len(keys))]
            chunks = self._chunks(keys[first:], blocks, source.write_to(blocks))
            statuses += session.stub.PutBlocks(chunks, timeout=_INLINE_TIMEOUT_S, metadata=session.metadata).statuses
        return statuses

    def load(self, keys: Keys, sink: BlockSink, patience: Patience) -> LoadReport:
        """See Transfer."""
        session = self._session
        request = pb.GetBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=keys)
        _set_patience(request, patience)
        report = LoadReport()
        into = memoryview(bytearray(sink.block_bytes))
        num_bytes, expected, tier = 0, b"", ""
        try:
            with CallDeadline(session.stub.GetBlocks(request, metadata=session.metadata), patience) as deadline:
                for chunk in deadline.responses():
                    if chunk.status != pb.BLOCK_STATUS_OK or deadline.is_over:
                        break
                    if chunk.block_bytes:
                        num_bytes, expected, tier = 0, chunk.checksum, _TIER_NAMES[chunk.tier]
                    end = num_bytes + len(chunk.data)
                    if end > into.nbytes:
                        raise OctavoError(f"the store sent more than the {into.nbytes} bytes of a block")
                    into[num_bytes:end] = chunk.data
                    num_bytes = end
                    if num_bytes == into.nbytes:
                        with closing(sink.fill([HostBlock(chunk.key_index, into, expected)])) as verdicts:
                            if not next(verdicts):
                                report.reason = CORRUPT
                                break
                        report.add(tier, deadline.extend())
            _note_end(report, deadline, len(keys))
        except grpc.RpcError as error:
            _keep_or_raise(session, report, error)
        return report

    def _chunks(self, keys: Keys, blocks: Sequence[HostBlock], sums: Sequence[bytes]) -> Iterator[pb.PutBlocksRequest]:
        session = self._session
        for key, block, written in zip(keys, blocks, sums, strict=True):
            for start in range(0, block.data.nbytes, session.inline_chunk_bytes):
                chunk = pb.PutBlocksRequest(session_id=session.session_id, epoch=session.epoch)
                chunk.data = bytes(block.data[start : start + session.inline_chunk_bytes])
                if start == 0:
                    chunk.key, chunk.block_bytes, chunk.checksum = key, block.data.nbytes, written
                yield chunk


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
