"""The scheduler's view of the block store: which leading blocks of a chain it has. For asyncio; touches no block.

Knows keys and tier names. A store that is not configured, dead or slow has nothing: no call raises.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import grpc.aio

from common.degraded import DegradedPaths
from common.ids import BlockKey
from common.rpc.address import Address
from common.rpc.channel import ChannelSecurity, aio_channel
from common.rpc.status import from_rpc_error
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from octavo.kvstore.v1 import kv_store_service_pb2_grpc as pb_grpc

_TIER_NAMES = {pb.TIER_SHM: "shm", pb.TIER_DISK: "disk", pb.TIER_REDIS: "redis"}
_TIMEOUT_S = 2.0
_PAUSE_S = 1.0
_SHARE_OF_WAIT = 0.7
_PREFETCH_TIMEOUT_S = 60.0
ResultT = TypeVar("ResultT")


class BlockStoreLookup:
    """See the module's first lines.

    Args:
        address: of the store; None: there is no store.
        degraded: counts kvstore_unavailable.
        security: how to reach a protected store.

    Attributes:
        connected: the last call was answered.
        reason: why not, if so.
    """

    def __init__(self, address: Address | None, degraded: DegradedPaths, security: ChannelSecurity | None = None):
        security = security or ChannelSecurity()
        self.connected = False
        self.reason = "not asked yet" if address is not None else "no block store is configured"
        self._degraded = degraded
        self._metadata = security.metadata()
        self._channel = aio_channel(address, security) if address is not None else None
        self._stub = pb_grpc.KvStoreServiceStub(self._channel) if self._channel is not None else None
        self._retry_at_s = 0.0

    async def lookup(self, keys: Sequence[BlockKey], timeout_s: float, wait_s: float) -> list[str]:
        """See BlockStore: tier names ("shm", "disk", "redis") of the leading keys that the store has; none if it fails."""
        if not keys:
            return []
        request = pb.LookupBlocksRequest(keys=keys)
        request.max_wait.FromMicroseconds(int(1e6 * _SHARE_OF_WAIT * wait_s))
        try:
            async with asyncio.timeout(wait_s):
                response = await self._call(lambda stub: stub.LookupBlocks(request, timeout=timeout_s, metadata=self._metadata))
        except TimeoutError:  # too late for this request; the store is none the worse for it
            self._degraded.note("store_lookup_late", f"a look-up took longer than the {1000 * wait_s:.1f} ms that it may")
            return []
        return [_TIER_NAMES[tier] for tier in response.tiers] if response is not None else []

    async def note_use(self, keys: Sequence[BlockKey]) -> None:
        """See BlockStore."""
        request = pb.LookupBlocksRequest(held_keys=keys)
        await self._call(lambda stub: stub.LookupBlocks(request, timeout=_TIMEOUT_S, metadata=self._metadata))

    async def prefetch(self, keys: Sequence[BlockKey], fingerprint: bytes, block_bytes: int) -> AsyncIterator[str]:
        """See BlockStore. Who stops listening ends the work."""
        if self._stub is None or not keys:
            return
        layout = pb.Layout(fingerprint=fingerprint, block_bytes=block_bytes)
        request = pb.PrefetchBlocksRequest(keys=keys, layout=layout)
        call = self._stub.PrefetchBlocks(request, timeout=_PREFETCH_TIMEOUT_S, metadata=self._metadata)
        try:
            async for response in call:
                yield _TIER_NAMES[response.tier]
        except grpc.aio.AioRpcError as error:
            self._degraded.note("kvstore_unavailable", from_rpc_error(error).message)
        finally:
            call.cancel()

    async def stats(self) -> pb.GetStatsResponse | None:
        """Counters of the store; None if it fails."""
        request = pb.GetStatsRequest()
        return await self._call(lambda stub: stub.GetStats(request, timeout=_TIMEOUT_S, metadata=self._metadata))

    async def clear(self) -> int:
        """Drops every block that nobody holds; returns how many, 0 if it fails."""
        request = pb.ClearBlocksRequest()
        response = await self._call(lambda stub: stub.ClearBlocks(request, timeout=_TIMEOUT_S, metadata=self._metadata))
        return response.num_dropped if response is not None else 0

    async def close(self) -> None:
        """Closes the channel."""
        self.connected, self.reason = False, "closed"
        if self._channel is not None:
            await self._channel.close()

    async def _call(self, call: Callable[["pb_grpc.KvStoreServiceAsyncStub"], Awaitable[ResultT]]) -> ResultT | None:
        """One call; after a failure the store is left alone for a while, so that requests do not wait for it in turn."""
        if self._stub is None or time.monotonic() < self._retry_at_s:
            return None
        try:
            response = await call(self._stub)
        except grpc.aio.AioRpcError as error:
            self.connected, self.reason = False, from_rpc_error(error).message
            self._retry_at_s = time.monotonic() + _PAUSE_S
            self._degraded.note("kvstore_unavailable", self.reason)
            return None
        self.connected, self.reason = True, ""
        self._degraded.clear("kvstore_unavailable")
        return response
