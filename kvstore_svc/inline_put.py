"""The state of one PutBlocks call: blocks that arrive in chunks and are written straight into their places.

Knows chunks, reservations and the tiers. Does not know gRPC's streams.
"""

from common.errors import InvalidParameter, StaleEpoch
from common.ids import BlockKey, LeaseId
from kvstore_svc import convert
from kvstore_svc.core.block_store import Refusal
from kvstore_svc.core.session import Lease, Session
from kvstore_svc.tiers.stack import TierStack
from octavo.kvstore.v1 import kv_store_service_pb2 as pb


class InlinePut:
    """Blocks one after the other. A block that is not taken is read to its end and forgotten."""

    def __init__(self, tiers: TierStack):
        self._tiers = tiers
        self._store = tiers.shm.store
        self._statuses: list[pb.BlockStatus.ValueType] = []
        self._session: Session | None = None
        self._lease: Lease | None = None
        self._checksum = b""
        self._num_missing_bytes = 0

    async def add(self, session: Session, chunk: pb.PutBlocksRequest) -> None:
        """The next chunk.

        Raises:
            InvalidParameter: chunks do not add up to blocks of the session's size.
            StaleEpoch: the session was closed meanwhile.
        """
        if self._session is not None and session is not self._session:
            raise InvalidParameter("session_id", "changes within the call")
        self._session = session
        if chunk.key:
            self._begin(session, chunk)
        if len(chunk.data) > self._num_missing_bytes:
            raise InvalidParameter("data", f"{len(chunk.data) - self._num_missing_bytes} bytes more than block_bytes")
        if self._lease is not None:
            if self._store.reservation(session, self._lease.lease_id) is None:
                raise StaleEpoch("the session was closed while a block arrived")
            view = self._tiers.shm.view(self._lease.block)
            start = len(view) - self._num_missing_bytes
            view[start : start + len(chunk.data)] = chunk.data
        self._num_missing_bytes -= len(chunk.data)
        if self._lease is not None and self._num_missing_bytes == 0:
            await self._commit(session, self._lease)

    def finish(self) -> list["pb.BlockStatus.ValueType"]:
        """One status per block, after the last chunk.

        Raises:
            InvalidParameter: the last block is not complete.
        """
        if self._num_missing_bytes:
            raise InvalidParameter("data", f"the last block lacks {self._num_missing_bytes} bytes")
        return self._statuses

    def abandon(self) -> None:
        """Gives back the room of a block that is not complete."""
        if self._session is not None and self._lease is not None:
            self._store.abort(self._session, [self._lease.lease_id])

    def _begin(self, session: Session, chunk: pb.PutBlocksRequest) -> None:
        key: BlockKey = convert.check_key(chunk.key, "key")
        if self._num_missing_bytes:
            raise InvalidParameter("data", f"the block before lacks {self._num_missing_bytes} bytes")
        if chunk.block_bytes != session.layout.block_bytes:
            raise InvalidParameter(
                "block_bytes", f"is {chunk.block_bytes}, the session's blocks have {session.layout.block_bytes}"
            )
        self._checksum = convert.check_checksum(chunk.checksum, "checksum")
        self._num_missing_bytes = chunk.block_bytes
        lease = self._store.reserve(session, key)
        if isinstance(lease, Refusal):
            self._statuses.append(convert.REFUSALS[lease])
        else:
            self._lease = lease

    async def _commit(self, session: Session, lease: Lease) -> None:
        (measured,) = await self._tiers.measure([lease.block])
        is_committed = self._store.commit(
            session,
            LeaseId(lease.lease_id),
            generation=lease.block.place.generation,
            claimed=self._checksum,
            measured=measured,
        )
        self._lease = None
        self._statuses.append(pb.BLOCK_STATUS_OK if is_committed else pb.BLOCK_STATUS_REJECTED)
        if is_committed:
            await self._tiers.committed([lease.block.key])
