"""What operators see and may do, from the engine and the block store themselves. Knows their messages; serves no call."""

from collections.abc import Callable, Mapping
from typing import Protocol

from common.errors import InvalidParameter, StartupError
from common.rpc.address import Address
from octavo import __version__
from octavo.kvstore.v1 import kv_store_service_pb2 as kvstore_pb
from octavo.scheduler.v1 import admin_service_pb2 as pb
from scheduler_svc.clients.block_store import BlockStore
from scheduler_svc.clients.executor import ExecutorConnector
from scheduler_svc.driver import ExecutorDriver
from scheduler_svc.engine import Engine
from scheduler_svc.load import load_message, tier_loads

_SAVES_TIMEOUT_S = 5.0


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


class EngineAdministration:
    """See the module's first lines, and Administration in edge/engine.py.

    Args:
        settings: by name for people, secrets masked.
        store_address: of the block store; empty: none.
        connector: how to reach an executor.
    """

    def __init__(
        self,
        engine: Engine,
        store: AdministeredStore,
        settings: Mapping[str, str],
        store_address: str,
        connector: Callable[[Address], ExecutorConnector],
    ):
        self._engine = engine
        self._store = store
        self._settings = settings
        self._store_address = store_address
        self._connector = connector
        self._started_at_s = engine.clock.now()

    async def server_info(self) -> pb.GetServerInfoResponse:
        """Versions, limits and peers."""
        tiers = tier_loads(self._engine, await self._store.stats())  # before asking whether it is connected
        return pb.GetServerInfoResponse(
            version=__version__,
            uptime_s=self._uptime_s,
            settings=self._settings,
            executors=[self._status(driver) for driver in self._engine.drivers],
            kvstore=pb.KvStoreStatus(
                address=self._store_address,
                connected=self._store.connected,
                reason=self._store.reason,
                tiers=tiers,
            ),
        )

    async def load(self) -> pb.GetLoadResponse:
        """Load of now."""
        tiers = tier_loads(self._engine, await self._store.stats())
        return pb.GetLoadResponse(load=load_message(self._engine, tiers, self._uptime_s))

    async def flush_cache(self, *, include_store: bool) -> pb.FlushCacheResponse:
        """Forgets cached prefixes that no request uses."""
        num_device_blocks = self._engine.flush_cache()
        num_store_blocks = 0
        if include_store:
            # What is on its way would be in the store after it was cleared.
            await self._engine.saves_end(_SAVES_TIMEOUT_S)
            num_device_blocks += self._engine.flush_cache()
            num_store_blocks = await self._store.clear()
        return pb.FlushCacheResponse(num_device_blocks=num_device_blocks, num_store_blocks=num_store_blocks)

    async def add_executor(self, address: str) -> pb.AddExecutorResponse:
        """An executor joins."""
        try:
            connector = self._connector(Address.parse(address))
        except StartupError as error:
            raise InvalidParameter("address", error.message) from error
        self._engine.fleet.add(connector)
        return pb.AddExecutorResponse(executor=self._status(self._driver(connector.address)))

    async def remove_executor(self, address: str, drain_s: float) -> pb.RemoveExecutorResponse:
        """An executor leaves."""
        self._engine.fleet.remove(address, drain_s)
        return pb.RemoveExecutorResponse(executor=self._status(self._driver(address)))

    def _driver(self, address: str) -> ExecutorDriver:
        return next(driver for driver in self._engine.drivers if driver.address == address)

    def _status(self, driver: ExecutorDriver) -> pb.ExecutorStatus:
        status = _executor_status(driver)
        status.leaving = self._engine.fleet.is_leaving(driver)
        return status

    @property
    def _uptime_s(self) -> float:
        return self._engine.clock.now() - self._started_at_s


def _executor_status(driver: ExecutorDriver) -> pb.ExecutorStatus:
    status = pb.ExecutorStatus(address=driver.address, connected=driver.is_connected, num_requests=len(driver.generations))
    if not driver.is_connected:
        status.problem = driver.problem.message
    if (info := driver.info) is not None:
        status.executor_id, status.model, status.backend, status.dtype = info.executor_id, info.model, info.backend, info.dtype
        status.num_blocks, status.block_size, status.block_bytes = info.num_blocks, info.block_size, info.block_bytes
        status.kv_dtype = info.kv_dtype
        status.memory_bytes.update(info.memory_bytes)
        status.kv_transport, status.kv_transport_reason = info.kv_transport, info.kv_transport_reason
    return status
