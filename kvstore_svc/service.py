"""The gRPC face of the block store: each method checks, calls the core or the tiers, and converts. Decides nothing."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from common.clock import Clock
from common.errors import StaleEpoch
from common.ids import BlockKey, Epoch, LeaseId, SessionId
from common.shm.host import host_id
from common.shm.slab import SHM_ABI
from kvstore_svc import convert
from kvstore_svc.core.block_store import Refusal
from kvstore_svc.core.session import Lease, LeaseKind, Session
from kvstore_svc.event_feed import EventFeed
from kvstore_svc.handover import HandoverServer
from kvstore_svc.inline_put import InlinePut
from kvstore_svc.tiers.inventory import INVENTORY_SESSION
from kvstore_svc.tiers.stack import DEFAULT_LOOKUP_WAIT_S, OWN_SESSION, Acquired, TierStack
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from octavo.kvstore.v1 import kv_store_service_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)
INLINE_CHUNK_BYTES = 1 << 20
OWN_SESSIONS = {OWN_SESSION, INVENTORY_SESSION}
Context = grpc.aio.ServicerContext[Any, Any]


class KvStoreService(pb_grpc.KvStoreServiceServicer):
    """octavo.kvstore.v1.KvStoreService.

    Args:
        tiers: all tiers.
        handover: the file descriptor socket.
        clock: for heartbeats.
        session_ttl_s, heartbeat_s: told to clients.
    """

    def __init__(self, tiers: TierStack, handover: HandoverServer, clock: Clock, *, session_ttl_s: float, heartbeat_s: float):
        self._tiers = tiers
        self._shm = tiers.shm
        self._store = tiers.shm.store
        self._handover = handover
        self._clock = clock
        self._session_ttl_s = session_ttl_s
        self._heartbeat_s = heartbeat_s
        self._started_s = clock.now()
        self._stopping = asyncio.Event()
        self._events = EventFeed(self._store)

    def stop(self) -> None:
        """Ends the streams of heartbeats and events, which would go on for ever."""
        self._stopping.set()
        self._events.close()

    def _session(self, request: Any) -> Session:
        """The session of a request that carries session_id and epoch; raises StaleEpoch."""
        return self._store.session(SessionId(request.session_id), Epoch(request.epoch), self._clock.now())

    # Sessions

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> pb.OpenSessionResponse:  # noqa: N802
        """See the proto."""
        layout = convert.layout_from_pb(request.layout, self._shm.places.largest_place_bytes)
        client_id = convert.client_id_from_pb(request.client_id)
        session = self._store.open_session(SessionId(str(uuid.uuid4())), client_id, layout, self._clock.now())
        response = pb.OpenSessionResponse(
            session_id=session.session_id,
            epoch=self._store.epoch,
            ttl=convert.duration_to_pb(self._session_ttl_s),
            heartbeat=convert.duration_to_pb(self._heartbeat_s),
            inline_chunk_bytes=INLINE_CHUNK_BYTES,
        )
        reason = _why_inline(request)
        if reason:
            response.inline_reason = reason
        else:
            ticket = self._handover.ticket(session.session_id)
            response.shm.CopyFrom(convert.offer_to_pb(self._shm, str(self._handover.path), ticket, SHM_ABI))
        return response

    async def ConfirmSession(self, request: pb.ConfirmSessionRequest, context: Context) -> pb.ConfirmSessionResponse:  # noqa: N802
        """See the proto."""
        session = self._session(request)
        session.transport = convert.TRANSPORTS.get(request.transport, "")
        session.transport_reason = request.reason[: convert.MAX_CLIENT_ID_LEN]
        log.info("session of %s: transport %s %s", session.client_id, session.transport, session.transport_reason)
        return pb.ConfirmSessionResponse()

    async def KeepSession(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.KeepSessionRequest], context: Context
    ) -> AsyncIterator[pb.KeepSessionResponse]:
        """See the proto."""
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while True:
                reading = asyncio.ensure_future(context.read())
                await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    reading.cancel()
                    return
                request = reading.result()
                if request is grpc.aio.EOF:
                    return
                try:
                    self._session(request)  # counts as a sign of life
                except StaleEpoch:
                    yield pb.KeepSessionResponse(fenced=True)
                    return
                yield pb.KeepSessionResponse()
        finally:
            stopping.cancel()

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:  # noqa: N802
        """See the proto."""
        session = self._session(request)
        self._store.close_session(session)
        self._handover.end_connection(session.session_id)
        return pb.CloseSessionResponse()

    # Reading

    async def LookupBlocks(self, request: pb.LookupBlocksRequest, context: Context) -> pb.LookupBlocksResponse:  # noqa: N802
        """See the proto."""
        wait_s = DEFAULT_LOOKUP_WAIT_S
        if request.HasField("max_wait"):
            wait_s = convert.wait_s_from_pb(request.max_wait, "max_wait")
        await self._tiers.touch(convert.keys_from_pb(request.held_keys))
        names = await self._tiers.lookup(convert.keys_from_pb(request.keys), wait_s)
        return pb.LookupBlocksResponse(epoch=self._store.epoch, tiers=[convert.TIERS[name] for name in names])

    async def AcquireBlocks(  # noqa: N802
        self, request: pb.AcquireBlocksRequest, context: Context
    ) -> AsyncIterator[pb.AcquireBlocksResponse]:
        """See the proto. A call that does not end in good order takes its leases back."""
        session = self._session(request)
        keys = convert.keys_from_pb(request.keys)
        patience = convert.patience_from_pb(request)
        granted: list[LeaseId] = []
        is_complete = False
        try:
            batches = self._tiers.acquire(session, keys, patience=patience, prefix_only=request.prefix_only)
            async with aclosing(batches):
                async for batch in batches:
                    granted += [acquired.lease.lease_id for acquired in batch if acquired.lease is not None]
                    yield pb.AcquireBlocksResponse(results=[self._result(acquired) for acquired in batch])
            is_complete = True
        finally:
            if not is_complete:
                self._store.release(session, granted)

    async def ReleaseBlocks(self, request: pb.ReleaseBlocksRequest, context: Context) -> pb.ReleaseBlocksResponse:  # noqa: N802
        """See the proto."""
        session = self._session(request)
        for lease_id in request.suspect_lease_ids:
            lease = session.leases.get(LeaseId(lease_id))
            if lease is not None and lease.kind is LeaseKind.READ:
                await self._tiers.is_intact(lease.block)
        self._store.release(session, [LeaseId(lease_id) for lease_id in request.lease_ids])
        return pb.ReleaseBlocksResponse()

    async def GetBlocks(  # noqa: N802
        self, request: pb.GetBlocksRequest, context: Context
    ) -> AsyncIterator[pb.GetBlocksResponse]:
        """See the proto."""
        session = self._session(request)
        keys = convert.keys_from_pb(request.keys)
        batches = self._tiers.acquire(session, keys, patience=convert.patience_from_pb(request), prefix_only=True)
        granted: list[LeaseId] = []
        try:
            async with aclosing(batches):
                async for batch in batches:
                    granted += [acquired.lease.lease_id for acquired in batch if acquired.lease is not None]
                    for acquired in batch:
                        lease = acquired.lease
                        if lease is None or not await self._tiers.is_intact(lease.block):
                            yield pb.GetBlocksResponse(key_index=acquired.key_index, status=pb.BLOCK_STATUS_MISS)
                            return
                        for chunk in self._chunks(session, acquired.key_index, lease, acquired.tier):
                            yield chunk
                        self._store.release(session, [lease.lease_id])
        finally:
            self._store.release(session, granted)

    async def PrefetchBlocks(  # noqa: N802
        self, request: pb.PrefetchBlocksRequest, context: Context
    ) -> AsyncIterator[pb.PrefetchBlocksResponse]:
        """See the proto."""
        layout = convert.layout_from_pb(request.layout, self._shm.places.largest_place_bytes)
        names = self._tiers.prefetch(layout, convert.keys_from_pb(request.keys))
        async with aclosing(names):
            started_s = self._clock.now()
            async for name in names:
                now_s = self._clock.now()
                yield pb.PrefetchBlocksResponse(tier=convert.TIERS[name], seconds=now_s - started_s)
                started_s = now_s

    # Writing

    async def ReserveBlocks(self, request: pb.ReserveBlocksRequest, context: Context) -> pb.ReserveBlocksResponse:  # noqa: N802
        """See the proto."""
        session = self._session(request)
        response = pb.ReserveBlocksResponse()
        present: list[BlockKey] = []
        for index, key in enumerate(convert.keys_from_pb(request.keys)):
            lease = self._store.reserve(session, key)
            if isinstance(lease, Refusal):
                if lease is Refusal.PRESENT:
                    present.append(key)
                response.results.add(key_index=index, status=convert.REFUSALS[lease])
            else:
                response.results.add(
                    key_index=index, status=pb.BLOCK_STATUS_OK, handle=convert.handle_to_pb(lease, self._shm), tier=pb.TIER_SHM
                )
        await self._tiers.touch(present)
        return response

    async def CommitBlocks(self, request: pb.CommitBlocksRequest, context: Context) -> pb.CommitBlocksResponse:  # noqa: N802
        """See the proto. The bytes are not read here: whoever reads them compares them with the checksum."""
        session = self._session(request)
        for index, commit in enumerate(request.commits):
            convert.check_checksum(commit.checksum, f"commits[{index}].checksum")
        response = pb.CommitBlocksResponse()
        committed: list[BlockKey] = []
        for commit in request.commits:
            block = self._store.reservation(session, LeaseId(commit.lease_id))
            is_committed = self._store.commit(
                session, LeaseId(commit.lease_id), generation=commit.generation, claimed=commit.checksum
            )
            response.statuses.append(pb.BLOCK_STATUS_OK if is_committed else pb.BLOCK_STATUS_REJECTED)
            if is_committed and block is not None:
                committed.append(block.key)
        await self._tiers.committed(committed)
        return response

    async def AbortBlocks(self, request: pb.AbortBlocksRequest, context: Context) -> pb.AbortBlocksResponse:  # noqa: N802
        """See the proto."""
        self._store.abort(self._session(request), [LeaseId(lease_id) for lease_id in request.lease_ids])
        return pb.AbortBlocksResponse()

    async def PutBlocks(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.PutBlocksRequest], context: Context
    ) -> pb.PutBlocksResponse:
        """See the proto."""
        put = InlinePut(self._tiers)
        try:
            async for request in request_iterator:
                await put.add(self._session(request), request)
            return pb.PutBlocksResponse(statuses=put.finish())
        finally:
            put.abandon()

    # Looking after the store

    async def WatchEvents(  # noqa: N802
        self, request: pb.WatchEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        """See the proto."""
        async for batch in self._events.watch(Epoch(request.epoch), request.sequence):
            yield convert.event_batch_to_pb(batch, self._store.epoch)

    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:  # noqa: N802
        """See the proto."""
        shm = convert.tier_stats_to_pb(self._shm.name, self._shm.counts())
        shm.num_leased_blocks = self._store.num_leased_blocks
        shm.largest_free_run_bytes = self._shm.places.largest_free_run_bytes
        return pb.GetStatsResponse(
            epoch=self._store.epoch,
            uptime_s=self._clock.now() - self._started_s,
            tiers=[shm, *(convert.lane_stats_to_pb(lane) for lane in self._tiers.lanes)],
            sessions=[convert.session_stats_to_pb(s) for s in self._store.sessions.values() if s.session_id not in OWN_SESSIONS],
            num_checksum_mismatches=self._store.counts.num_checksum_mismatches,
            num_fenced_sessions=self._store.counts.num_fenced_sessions,
            num_quarantined_blocks=self._store.num_quarantined_blocks,
            degraded=dict(self._tiers.degraded.counts),
        )

    async def ClearBlocks(self, request: pb.ClearBlocksRequest, context: Context) -> pb.ClearBlocksResponse:  # noqa: N802
        """See the proto."""
        num_dropped, num_kept = await self._tiers.clear(request.layout_fingerprint or None)
        return pb.ClearBlocksResponse(num_dropped=num_dropped, num_kept=num_kept)

    def _chunks(self, session: Session, key_index: int, lease: Lease, tier: str) -> Iterator[pb.GetBlocksResponse]:
        """A leased block in messages; raises StaleEpoch when the lease is taken away meanwhile."""
        view = self._shm.view(lease.block)
        for start in range(0, len(view), INLINE_CHUNK_BYTES):
            if lease.lease_id not in session.leases:
                raise StaleEpoch("the session was closed while a block was sent")
            data = bytes(view[start : start + INLINE_CHUNK_BYTES])
            chunk = pb.GetBlocksResponse(key_index=key_index, status=pb.BLOCK_STATUS_OK, data=data)
            if start == 0:
                chunk.block_bytes, chunk.checksum, chunk.tier = len(view), lease.block.checksum, convert.TIERS[tier]
            yield chunk

    def _result(self, acquired: Acquired) -> pb.BlockResult:
        if acquired.lease is None:
            return pb.BlockResult(key_index=acquired.key_index, status=pb.BLOCK_STATUS_MISS)
        return pb.BlockResult(
            key_index=acquired.key_index,
            status=pb.BLOCK_STATUS_OK,
            handle=convert.handle_to_pb(acquired.lease, self._shm),
            tier=convert.TIERS[acquired.tier],
        )


def _why_inline(request: pb.OpenSessionRequest) -> str:
    """Why shared memory is not offered; empty: it is."""
    if request.transport == pb.TRANSPORT_INLINE:
        return "the client asked for inline"
    if request.host_id != host_id():
        return "the client is on another host"
    if request.shm_abi != SHM_ABI:
        return f"the client knows shared-memory ABI {request.shm_abi}, the store {SHM_ABI}"
    return ""
