"""What happens around every call of a server: tokens are checked, and exceptions become statuses. Knows no service."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from common.errors import OctavoError
from common.rpc.security import ServerSecurity
from common.rpc.status import abort

log = logging.getLogger(__name__)
Handler = grpc.RpcMethodHandler[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]

# Probes and tools may look without a token.
_OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns an OctavoError into its status, and anything else into INTERNAL with a log entry."""

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler:
        """Wraps the handler of one call."""
        handler = await continuation(details)
        if handler is None:
            return handler
        return _wrap(handler, details.method)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Checks the bearer token of every call but health checks and reflection."""

    def __init__(self, security: ServerSecurity, admin_services: tuple[str, ...] = ()):
        self._security = security
        self._admin_services = admin_services

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler:
        """Lets the call through or answers it with UNAUTHENTICATED or PERMISSION_DENIED."""
        if not details.method.startswith(_OPEN_SERVICES):
            metadata = dict(details.invocation_metadata or ())
            authorization = metadata.get("authorization")
            admin = details.method.split("/")[1] in self._admin_services
            try:
                self._security.check_call(authorization if isinstance(authorization, str) else None, admin=admin)
            except OctavoError as error:
                return _refuse(await continuation(details), error)
        return await continuation(details)


def _wrap(handler: Handler, method: str) -> Handler:
    if handler.response_streaming:
        inner_stream = handler.stream_stream or handler.unary_stream

        async def stream(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> AsyncIterator[Any]:
            try:
                async for response in inner_stream(request, context):
                    yield response
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                await _abort_with(error, context, method)

        make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        return make(stream, handler.request_deserializer, handler.response_serializer)  # type: ignore[operator]

    inner = handler.stream_unary or handler.unary_unary

    async def unary(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        try:
            return await inner(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _abort_with(error, context, method)

    make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    return make(unary, handler.request_deserializer, handler.response_serializer)  # type: ignore[operator]


def _refuse(handler: Handler, error: OctavoError) -> Handler:
    if handler is None:
        return handler

    async def stream(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> AsyncIterator[Any]:
        await abort(context, error)
        yield  # makes this an asynchronous generator

    async def unary(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
        await abort(context, error)

    match handler.request_streaming, handler.response_streaming:
        case False, False:
            return grpc.unary_unary_rpc_method_handler(unary, handler.request_deserializer, handler.response_serializer)  # type: ignore[arg-type]
        case False, True:
            return grpc.unary_stream_rpc_method_handler(stream, handler.request_deserializer, handler.response_serializer)  # type: ignore[arg-type]
        case True, False:
            return grpc.stream_unary_rpc_method_handler(unary, handler.request_deserializer, handler.response_serializer)  # type: ignore[arg-type]
        case _:
            return grpc.stream_stream_rpc_method_handler(stream, handler.request_deserializer, handler.response_serializer)  # type: ignore[arg-type]


async def _abort_with(error: Exception, context: "grpc.aio.ServicerContext[Any, Any]", method: str) -> None:
    if not isinstance(error, OctavoError):
        log.exception("%s failed", method)
        error = OctavoError("internal error; the server's log has the details")
    await abort(context, error)
