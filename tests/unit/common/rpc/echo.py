"""A service of four methods, one per kind of call, that does what a test tells it."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from common.rpc.address import Address
from common.rpc.security import ServerSecurity
from common.rpc.server import RpcServer

SERVICE = "test.EchoService"
Work = Callable[[bytes], Awaitable[None]]
"""Called with each request, before the answer; may raise."""


async def nothing(request: bytes) -> None:
    pass


class Echo:
    """Answers with the request; streams answer twice per request."""

    def __init__(self, work: Work = nothing):
        self._work = work
        self.num_closed = 0

    async def unary(self, request: bytes, context: Any) -> bytes:
        await self._work(request)
        return request

    async def stream(self, request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        try:
            yield request
            await self._work(request)
            yield request
        finally:
            self.num_closed += 1

    async def collect(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        answer = b""
        async for request in requests:
            await self._work(request)
            answer += request
        return answer

    async def converse(self, requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes, None]:
        async for request in requests:
            await self._work(request)
            yield request

    def handler(self) -> Any:
        methods: dict[str, Any] = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "Stream": grpc.unary_stream_rpc_method_handler(self.stream),
            "Collect": grpc.stream_unary_rpc_method_handler(self.collect),
            "Converse": grpc.stream_stream_rpc_method_handler(self.converse),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)


@asynccontextmanager
async def serving(echo: Echo, listen: str, security: ServerSecurity | None = None, **options: Any) -> AsyncIterator[RpcServer]:
    """A started server with the service."""
    server = RpcServer(Address.parse(listen), security or ServerSecurity(), [SERVICE], **options)
    server.grpc.add_generic_rpc_handlers((echo.handler(),))
    try:
        await server.start()
        yield server
    finally:
        await server.stop(0)


async def call_kind(channel: Any, kind: str, *requests: bytes, **options: Any) -> list[bytes]:
    """All answers of a call to one of the four methods."""
    method = f"/{SERVICE}/{kind}"
    match kind:
        case "Unary":
            return [await channel.unary_unary(method)(requests[0], **options)]
        case "Stream":
            return [answer async for answer in channel.unary_stream(method)(requests[0], **options)]
        case "Collect":
            return [await channel.stream_unary(method)(iter(requests), **options)]
        case _:
            return [answer async for answer in channel.stream_stream(method)(iter(requests), **options)]


KINDS = ("Unary", "Stream", "Collect", "Converse")
