"""What happens around every call of a server: tokens are checked, and exceptions become statuses. Knows no service."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio

from common.errors import OctavoError
from common.rpc.malformed import Malformed, tolerant
from common.rpc.security import ServerSecurity
from common.rpc.status import abort

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
# Strings: the class is generic to type checkers only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
# A method of a servicer, of any of the four kinds; answers with an awaitable or an asynchronous generator.
Behaviour = Callable[[Any, Context], Any]

# Probes and tools may look without a token.
_OPEN_SERVICES = ("/grpc.health.v1.Health/", "/grpc.reflection.")
# By (request_streaming, response_streaming).
_FACTORIES: dict[tuple[bool, bool], Callable[..., "Handler"]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns an OctavoError into its status, and anything else into INTERNAL with a log entry."""

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        """Wraps the handler of one call."""
        handler = await continuation(details)
        if handler is None:
            return None
        method = details.method
        behaviour = _behaviour(handler)
        accept = _parsed if handler.request_streaming else _checked

        async def unary(request: Any, context: Context) -> Any:
            try:
                return await behaviour(accept(request), context)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                await _abort_with(error, context, method)

        async def stream(request: Any, context: Context) -> None:
            try:
                answer = behaviour(accept(request), context)
                if isinstance(answer, AsyncGenerator):
                    # Closed here and now: a client that vanished must not hold its request until the garbage collector comes.
                    async with aclosing(answer):
                        async for response in answer:
                            await context.write(response)
                else:
                    await answer  # it writes to the context itself
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                await _abort_with(error, context, method)

        make = _FACTORIES[handler.request_streaming, handler.response_streaming]
        deserializer = tolerant(handler.request_deserializer, method) if handler.request_deserializer else None
        return make(stream if handler.response_streaming else unary, deserializer, handler.response_serializer)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Checks the bearer token of every call but health checks and reflection."""

    def __init__(self, security: ServerSecurity, admin_services: tuple[str, ...] = ()):
        self._security = security
        self._admin_services = admin_services

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        """Lets the call through or answers it with UNAUTHENTICATED or PERMISSION_DENIED."""
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN_SERVICES):
            return handler
        authorization = dict(details.invocation_metadata or ()).get("authorization")
        admin = details.method.split("/")[1] in self._admin_services
        try:
            self._security.check_call(authorization if isinstance(authorization, str) else None, admin=admin)
        except OctavoError as error:
            return _with_behaviour(handler, _refusal(error))
        return handler


def _behaviour(handler: Handler) -> Behaviour:
    behaviour: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    return behaviour  # type: ignore[no-any-return]  # typed for synchronous servers


def _with_behaviour(handler: Handler, behaviour: Behaviour) -> Handler:
    make = _FACTORIES[handler.request_streaming, handler.response_streaming]
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


def _checked(request: Any) -> Any:
    if isinstance(request, Malformed):
        raise request.error
    return request


async def _parsed(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _refusal(error: OctavoError) -> Behaviour:
    async def refuse(request: Any, context: Context) -> None:
        await abort(context, error)

    return refuse


async def _abort_with(error: Exception, context: Context, method: str) -> None:
    if not isinstance(error, OctavoError):
        log.exception("%s failed", method)
        error = OctavoError("internal error; the server's log has the details")
    await abort(context, error)
