"""The client of Octavo's public API, for threads and for asyncio.

Sends the calls of calls.py over a channel and turns statuses into errors. Knows deadlines, tokens and TLS; builds no message.
"""

from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

from common.rpc.address import Address
from common.rpc.channel import ChannelSecurity, aio_channel, sync_channel
from common.rpc.status import from_rpc_error
from octavo import calls
from octavo.answers import Completion, Event, Finished, FinishReason, Model, TextDelta, Tokens
from octavo.calls import Call, ResponseT, ResultT
from octavo.errors import InvalidParameter, OctavoError, Unavailable
from octavo.load import ExecutorStatus, Flushed, Load, ServerInfo
from octavo.prompt import ChatMessage, GenerateOptions, Prompt

__all__ = [
    "DEFAULT_TARGET",
    "AsyncOctavoClient",
    "ChatMessage",
    "ClientSecurity",
    "Completion",
    "Event",
    "FinishReason",
    "Finished",
    "OctavoClient",
    "TextDelta",
]

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class ClientSecurity:
    """How to reach a protected server.

    Attributes:
        tls_ca: PEM file of the authority to trust; None for a plain connection.
        tls_cert, tls_key: PEM files of this side's certificate, for servers that ask for one.
        insecure: send the token over a plain connection to another host.
    """

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False


_NO_SECURITY = ClientSecurity()


class OctavoClient:
    """A synchronous client. Safe to use from several threads.

    Every method raises the errors of octavo.errors: InvalidParameter for what the server refuses, Unavailable when it cannot
    be reached, DeadlineExceeded when timeout_s has passed.

    Example:
        >>> from octavo.client import ChatMessage, Finished, OctavoClient, TextDelta
        >>> with OctavoClient("127.0.0.1:50051") as client:
        ...     answer = client.generate("The capital of France is", max_tokens=8, temperature=0.0)
        ...     print(answer.text, answer.usage.cached_tokens)
        ...     for event in client.stream([ChatMessage("user", "Name three colours.")], max_tokens=64):
        ...         match event:
        ...             case TextDelta(text=text):
        ...                 print(text, end="", flush=True)
        ...             case Finished(usage=usage, timing=timing):
        ...                 print(f"\\n{usage.completion_tokens} tokens in {timing.total_s:.1f} s")

    Args:
        target: "host:port" or "unix:/path".
        token: the server's bearer token, or a tenant's, if it asks for one.
        tenant: for a gateway with the server's token: whom it calls for.
        timeout_s: deadline of a call that gives none itself.
        security: certificates; see ClientSecurity.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        token: str = "",
        tenant: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        security: ClientSecurity = _NO_SECURITY,
    ):
        address, channel_security = _connection(target, token, security)
        self._target = address.target
        self._metadata = channel_security.metadata() + _tenant_metadata(tenant)
        self._timeout_s = timeout_s
        self._channel = sync_channel(address, channel_security)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; running calls end with Cancelled."""
        self._channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer to a prompt. Options: see GenerateOptions."""
        return self._unary(calls.generate(prompt, options), options.get("timeout_s"))

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generator[Event, None, None]:
        """The answer as it comes: TextDelta events, then one Finished. Closing it cancels the request."""
        return self._streamed(calls.stream(prompt, options), options.get("timeout_s", self._timeout_s))

    def cancel(self, request_id: str) -> bool:
        """Ends a request by its id. Its caller gets Cancelled. False: no such request is running."""
        return self._unary(calls.cancel(request_id))

    def tokenize(self, prompt: Prompt, *, model: str = "") -> Tokens:
        """Token ids of a text or a conversation."""
        return self._unary(calls.tokenize(prompt, model))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return self._unary(calls.detokenize(token_ids, model, skip_special_tokens))

    def models(self) -> list[Model]:
        """All models of the server, in order of name."""
        found, page_token = self._unary(calls.list_models(""))
        while page_token:
            page, page_token = self._unary(calls.list_models(page_token))
            found += page
        return found

    def server_info(self) -> ServerInfo:
        """Version, settings and peers of the server. Needs the admin token where there is one."""
        return self._unary(calls.server_info())

    def load(self) -> Load:
        """The load of now. Needs the admin token where there is one."""
        return self._unary(calls.get_load())

    def watch_load(self, interval_s: float = 1.0) -> Generator[Load, None, None]:
        """The load every interval, without end. Needs the admin token where there is one."""
        return self._streamed(calls.watch_load(interval_s), None)

    def flush_cache(self, *, include_store: bool = False) -> Flushed:
        """Forgets cached prefixes that no request uses. Needs the admin token where there is one."""
        return self._unary(calls.flush_cache(include_store))

    def add_executor(self, address: str) -> ExecutorStatus:
        """Lets an executor join while requests run, until the server's next start. Needs the admin token where there is one."""
        return self._unary(calls.add_executor(address))

    def remove_executor(self, address: str, *, drain_s: float = 30.0) -> ExecutorStatus:
        """Lets an executor leave: no new requests, and those that run get so long, then they move. Needs the admin token, too.

        Returns at once; server_info shows it until it has left.
        """
        return self._unary(calls.remove_executor(address, drain_s))

    def _unary(self, call: Call[ResponseT, ResultT], timeout_s: float | None = None) -> ResultT:
        send = self._channel.unary_unary(call.method, type(call.request).SerializeToString, call.response_type.FromString)
        try:
            response = send(call.request, timeout=self._timeout_s if timeout_s is None else timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error(error, self._target) from error
        return call.convert(response)

    def _streamed(self, call: Call[ResponseT, list[ResultT]], timeout_s: float | None) -> Generator[ResultT, None, None]:
        send = self._channel.unary_stream(call.method, type(call.request).SerializeToString, call.response_type.FromString)
        responses = send(call.request, timeout=timeout_s, metadata=self._metadata)
        try:
            for response in responses:
                yield from call.convert(response)
        except grpc.RpcError as error:
            raise _error(error, self._target) from error
        finally:
            responses.cancel()


class AsyncOctavoClient:
    """The same for asyncio; every call may run at the same time as others of the same client.

    Example:
        >>> async with AsyncOctavoClient("127.0.0.1:50051") as client:
        ...     async for event in client.stream("Once upon a time", max_tokens=32):
        ...         if isinstance(event, TextDelta):
        ...             print(event.text, end="")

    Args:
        target, token, tenant, timeout_s, security: as for OctavoClient.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        token: str = "",
        tenant: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        security: ClientSecurity = _NO_SECURITY,
    ):
        address, channel_security = _connection(target, token, security)
        self._target = address.target
        self._metadata = channel_security.metadata() + _tenant_metadata(tenant)
        self._timeout_s = timeout_s
        self._channel = aio_channel(address, channel_security)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """See OctavoClient.close."""
        await self._channel.close()

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """See OctavoClient.generate."""
        return await self._unary(calls.generate(prompt, options), options.get("timeout_s"))

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerator[Event, None]:
        """See OctavoClient.stream."""
        return self._streamed(calls.stream(prompt, options), options.get("timeout_s", self._timeout_s))

    async def cancel(self, request_id: str) -> bool:
        """See OctavoClient.cancel."""
        return await self._unary(calls.cancel(request_id))

    async def tokenize(self, prompt: Prompt, *, model: str = "") -> Tokens:
        """See OctavoClient.tokenize."""
        return await self._unary(calls.tokenize(prompt, model))

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        """See OctavoClient.detokenize."""
        return await self._unary(calls.detokenize(token_ids, model, skip_special_tokens))

    async def models(self) -> list[Model]:
        """See OctavoClient.models."""
        found, page_token = await self._unary(calls.list_models(""))
        while page_token:
            page, page_token = await self._unary(calls.list_models(page_token))
            found += page
        return found

    async def server_info(self) -> ServerInfo:
        """See OctavoClient.server_info."""
        return await self._unary(calls.server_info())

    async def load(self) -> Load:
        """See OctavoClient.load."""
        return await self._unary(calls.get_load())

    def watch_load(self, interval_s: float = 1.0) -> AsyncGenerator[Load, None]:
        """See OctavoClient.watch_load."""
        return self._streamed(calls.watch_load(interval_s), None)

    async def flush_cache(self, *, include_store: bool = False) -> Flushed:
        """See OctavoClient.flush_cache."""
        return await self._unary(calls.flush_cache(include_store))

    async def add_executor(self, address: str) -> ExecutorStatus:
        """See OctavoClient.add_executor."""
        return await self._unary(calls.add_executor(address))

    async def remove_executor(self, address: str, *, drain_s: float = 30.0) -> ExecutorStatus:
        """See OctavoClient.remove_executor."""
        return await self._unary(calls.remove_executor(address, drain_s))

    async def _unary(self, call: Call[ResponseT, ResultT], timeout_s: float | None = None) -> ResultT:
        send = self._channel.unary_unary(call.method, type(call.request).SerializeToString, call.response_type.FromString)
        try:
            response = await send(
                call.request, timeout=self._timeout_s if timeout_s is None else timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise _error(error, self._target) from error
        return call.convert(response)

    async def _streamed(self, call: Call[ResponseT, list[ResultT]], timeout_s: float | None) -> AsyncGenerator[ResultT, None]:
        send = self._channel.unary_stream(call.method, type(call.request).SerializeToString, call.response_type.FromString)
        responses = send(call.request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in responses:
                for result in call.convert(response):
                    yield result
        except grpc.RpcError as error:
            raise _error(error, self._target) from error
        finally:
            responses.cancel()


def _tenant_metadata(tenant: str) -> tuple[tuple[str, str], ...]:
    if not (tenant.isascii() and (tenant.isprintable() or not tenant)):
        raise InvalidParameter("tenant", "holds characters that are not printable ASCII")
    return (("octavo-tenant", tenant),) if tenant else ()


def _connection(target: str, token: str, security: ClientSecurity) -> tuple[Address, ChannelSecurity]:
    address = Address.parse(target)
    if token and security.tls_ca is None and not address.is_local and not security.insecure:
        raise InvalidParameter("token", f"is not sent to {target} over a plain connection; give tls_ca, or set insecure")
    return address, ChannelSecurity(security.tls_ca, security.tls_cert, security.tls_key, token)


def _error(error: grpc.RpcError, target: str) -> OctavoError:
    found = from_rpc_error(error)
    if type(found) is Unavailable and found.message.startswith("failed to connect"):
        return Unavailable(f"no server answers at {target}: {found.message.rpartition(': ')[2]}")
    return found
