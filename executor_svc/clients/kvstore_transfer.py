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
from executor_svc.clients.kvstore_report import CORRUPT, OUT_OF_TIME, TIER_NAMES, LoadReport
from executor_svc.clients.kvstore_session import CALL_TIMEOUT_S, StoreSession
from executor_svc.clients.shm_load import ShmLoad, block_view
from executor_svc.core.host_block import BlockSink, BlockSource, HostBlock
from octavo.kvstore.v1 import kv_store_service_pb2 as pb

Keys = Sequence[BlockKey]
Statuses = list["pb.BlockStatus.ValueType"]
# The store answers before the client gives up on it, so that a slow tier costs a miss and not the call.
_SHARE_OF_TIMEOUT = 0.8
_INLINE_TIMEOUT_S = 30.0
_SAVED_TOGETHER_BYTES = 64 << 20
"""Of blocks that are reserved with one call and committed with one: a call takes as long as the copies of half a MiB."""


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
        """See Transfer. The store makes room and takes blocks in while others are copied."""
        num_together = max(1, _SAVED_TOGETHER_BYTES // source.block_bytes)
        starts = range(0, len(keys), num_together)
        reserving = [self._reserve(keys[start : start + num_together]) for start in starts]
        statuses: Statuses = []
        committing: list[tuple[list[int], grpc.Future[pb.CommitBlocksResponse]]] = []
        for start, reserved in zip(starts, reserving, strict=True):
            results = reserved.result().results
            statuses += [result.status for result in results]
            given = [result for result in results if result.status == pb.BLOCK_STATUS_OK]
            if given:
                indices = [start + result.key_index for result in given]
                handles = [result.handle for result in given]
                places = [
                    HostBlock(i, block_view(self._attachment, h, source.block_bytes))
                    for i, h in zip(indices, handles, strict=True)
                ]
                committing.append((indices, self._commit(handles, source.write_to(places))))
        for indices, committed in committing:
            for index, status in zip(indices, committed.result().statuses, strict=True):
                statuses[index] = status
        return statuses

    def load(self, keys: Keys, sink: BlockSink, patience: Patience) -> LoadReport:
        """See Transfer."""
        session = self._session
        request = pb.AcquireBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=keys, prefix_only=True)
        _set_patience(request, patience)
        with CallDeadline(session.stub.AcquireBlocks(request, metadata=session.metadata), patience) as deadline:
            filling = sink.begin()
            load = ShmLoad(session, self._attachment, filling, sink.block_bytes, deadline)
            report = load.report
            try:
                with closing(filling):
                    load.run()
                _note_end(report, deadline, len(keys))
                load.finish()
            except grpc.RpcError as error:
                _keep_or_raise(session, report, error)
        return report

    def _reserve(self, keys: Keys) -> "grpc.Future[pb.ReserveBlocksResponse]":
        session = self._session
        request = pb.ReserveBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=keys)
        return session.stub.ReserveBlocks.future(request, timeout=CALL_TIMEOUT_S, metadata=session.metadata)

    def _commit(self, handles: Sequence[pb.BlockHandle], sums: Sequence[bytes]) -> "grpc.Future[pb.CommitBlocksResponse]":
        session = self._session
        commits = [
            pb.Commit(lease_id=handle.lease_id, generation=handle.generation, checksum=written)
            for handle, written in zip(handles, sums, strict=True)
        ]
        request = pb.CommitBlocksRequest(session_id=session.session_id, epoch=session.epoch, commits=commits)
        return session.stub.CommitBlocks.future(request, timeout=CALL_TIMEOUT_S, metadata=session.metadata)


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
            with (
                CallDeadline(session.stub.GetBlocks(request, metadata=session.metadata), patience) as deadline,
                closing(sink.begin()) as filling,
            ):
                for chunk in deadline.responses():
                    if chunk.status != pb.BLOCK_STATUS_OK or deadline.is_over:
                        break
                    if chunk.block_bytes:
                        num_bytes, expected, tier = 0, chunk.checksum, TIER_NAMES[chunk.tier]
                    end = num_bytes + len(chunk.data)
                    if end > into.nbytes:
                        raise OctavoError(f"the store sent more than the {into.nbytes} bytes of a block")
                    into[num_bytes:end] = chunk.data
                    num_bytes = end
                    if num_bytes == into.nbytes:
                        filling.add([HostBlock(chunk.key_index, into, expected)])
                        if not all(filling.verdicts()):
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
