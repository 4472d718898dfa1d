"""AdminService: looks into the server, empties its caches, lets executors join and leave. An Administration does the work."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from common.errors import InvalidParameter
from octavo.scheduler.v1 import admin_service_pb2 as pb
from octavo.scheduler.v1 import admin_service_pb2_grpc as pb_grpc
from scheduler_svc.edge.engine import Administration

Context = grpc.aio.ServicerContext[Any, Any]

_MIN_INTERVAL_S = 0.1
_DEFAULT_INTERVAL_S = 1.0
_DEFAULT_DRAIN_S = 30.0


class AdminServicer(pb_grpc.AdminServiceServicer):
    """See the module's first lines."""

    def __init__(self, administration: Administration):
        self._administration = administration

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:  # noqa: N802
        """Versions, limits and peers."""
        return await self._administration.server_info()

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:  # noqa: N802
        """Load of now."""
        return await self._administration.load()

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Context) -> AsyncIterator[pb.WatchLoadResponse]:  # noqa: N802
        """Load every interval."""
        interval_s = request.interval.ToNanoseconds() / 1e9 if request.HasField("interval") else _DEFAULT_INTERVAL_S
        if interval_s < _MIN_INTERVAL_S:
            raise InvalidParameter("interval", f"{interval_s:g} s is too short, at least {_MIN_INTERVAL_S:g} s")
        while True:
            yield pb.WatchLoadResponse(load=(await self._administration.load()).load)
            await asyncio.sleep(interval_s)

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:  # noqa: N802
        """Forgets cached prefixes that no request uses."""
        return await self._administration.flush_cache(include_store=request.include_store)

    async def AddExecutor(self, request: pb.AddExecutorRequest, context: Context) -> pb.AddExecutorResponse:  # noqa: N802
        """An executor joins."""
        return await self._administration.add_executor(request.address)

    async def RemoveExecutor(self, request: pb.RemoveExecutorRequest, context: Context) -> pb.RemoveExecutorResponse:  # noqa: N802
        """An executor leaves."""
        drain_s = request.drain.ToNanoseconds() / 1e9 if request.HasField("drain") else _DEFAULT_DRAIN_S
        if drain_s < 0:
            raise InvalidParameter("drain", f"{drain_s:g} s is less than nothing")
        return await self._administration.remove_executor(request.address, drain_s)
