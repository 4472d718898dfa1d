"""AdminService: looks into the server and empties its caches. Knows the calls; an Administration answers them."""

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
