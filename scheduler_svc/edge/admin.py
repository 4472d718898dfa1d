"""AdminService: looks into the server and empties its caches. Reads the engine and the block store's statistics."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import grpc.aio

from common.errors import InvalidParameter
from octavo import __version__
from octavo.kvstore.v1 import kv_store_service_pb2 as kvstore_pb
from octavo.scheduler.v1 import admin_service_pb2 as pb
from octavo.scheduler.v1 import admin_service_pb2_grpc as pb_grpc
from scheduler_svc.clients.block_store import BlockStore
from scheduler_svc.driver import ExecutorDriver
from scheduler_svc.edge.load import load_message, tier_loads
from scheduler_svc.engine import Engine

Context = grpc.aio.ServicerContext[Any, Any]

_MIN_INTERVAL_S = 0.1
_SAVES_TIMEOUT_S = 5.0
_DEFAULT_INTERVAL_S = 1.0


class AdministeredStore(BlockStore, Protocol):
    """What operators ask of the block store."""

    async def stats(self) -> kvstore_pb.GetStatsResponse | None:
        """Counters of the store; None when it does not answer."""
        ...

    async def clear(self) -> int:
        """Drops every block that nobody holds.

        Returns:
            How many; 0 when the store does not answer.
        """
        ...


class AdminServicer(pb_grpc.AdminServiceServicer):
    """See the module's first lines.

    Args:
        settings: by name for people, secrets masked.
        store_address: of the block store; empty: none.
    """

    def __init__(self, engine: Engine, store: AdministeredStore, settings: Mapping[str, str], store_address: str):
        self._engine = engine
        self._store = store
        self._settings = settings
        self._store_address = store_address
        self._started_at_s = engine.clock.now()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:  # noqa: N802
        """Versions, limits and peers."""
        tiers = tier_loads(await self._store.stats())  # before asking whether it is connected
        return pb.GetServerInfoResponse(
            version=__version__,
            uptime_s=self._uptime_s,
            settings=self._settings,
            executors=[_executor_status(driver) for driver in self._engine.drivers],
            kvstore=pb.KvStoreStatus(
                address=self._store_address,
                connected=self._store.connected,
                reason=self._store.reason,
                tiers=tiers,
            ),
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:  # noqa: N802
        """Load of now."""
        return pb.GetLoadResponse(load=await self._load())

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Context) -> AsyncIterator[pb.WatchLoadResponse]:  # noqa: N802
        """Load every interval."""
        interval_s = request.interval.ToNanoseconds() / 1e9 if request.HasField("interval") else _DEFAULT_INTERVAL_S
        if interval_s < _MIN_INTERVAL_S:
            raise InvalidParameter("interval", f"{interval_s:g} s is too short, at least {_MIN_INTERVAL_S:g} s")
        while True:
            yield pb.WatchLoadResponse(load=await self._load())
            await asyncio.sleep(interval_s)

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:  # noqa: N802
        """Forgets cached prefixes that no request uses."""
        num_device_blocks = self._engine.flush_cache()
        num_store_blocks = 0
        if request.include_store:
            # What is on its way would be in the store after it was cleared.
            await self._engine.saves_end(_SAVES_TIMEOUT_S)
            num_device_blocks += self._engine.flush_cache()
            num_store_blocks = await self._store.clear()
        return pb.FlushCacheResponse(num_device_blocks=num_device_blocks, num_store_blocks=num_store_blocks)

    @property
    def _uptime_s(self) -> float:
        return self._engine.clock.now() - self._started_at_s

    async def _load(self) -> pb.Load:
        return load_message(self._engine, tier_loads(await self._store.stats()), self._uptime_s)


def _executor_status(driver: ExecutorDriver) -> pb.ExecutorStatus:
    status = pb.ExecutorStatus(address=driver.address, connected=driver.is_connected)
    if (info := driver.info) is not None:
        status.executor_id, status.model, status.backend, status.dtype = info.executor_id, info.model, info.backend, info.dtype
        status.num_blocks, status.block_size, status.block_bytes = info.num_blocks, info.block_size, info.block_bytes
        status.memory_bytes.update(info.memory_bytes)
        status.kv_transport, status.kv_transport_reason = info.kv_transport, info.kv_transport_reason
    return status
