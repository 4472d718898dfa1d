"""The life of a gRPC server, the same for every service: options, interceptors, health, reflection, SIGTERM, grace.

Knows how a server is opened and closed, not what it serves.

    async with ... :
        server = RpcServer(address, security, services=[...])
        add_XServicer_to_server(servicer, server.grpc)
        await server.start()          # SERVING
        await server.wait_for_stop()  # SIGTERM, SIGINT or stop()
        await server.stop(grace_s)    # NOT_SERVING, running calls finish
"""

import asyncio
import logging
import signal
from collections.abc import Sequence
from typing import IO

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from common.errors import StartupError
from common.rpc.address import Address, lock_socket
from common.rpc.interceptors import ErrorInterceptor, TokenInterceptor
from common.rpc.security import ServerSecurity

log = logging.getLogger(__name__)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def stop_signal(requested: asyncio.Event | None = None) -> None:
    """Returns on SIGTERM or SIGINT, or when requested is set."""
    stop = asyncio.Event() if requested is None else requested
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


class RpcServer:
    """One gRPC server with health and reflection.

    Args:
        address: where to listen.
        security: what callers must show.
        services: full names of the services that will be added, for health and reflection.
        max_message_bytes: longest message in either direction.
        admin_services: those of services that need the admin token.
        shares_port: other processes listen on the address too, see shared_port.py; otherwise a second server is refused.
        max_concurrent_calls: last defence against floods, well above any queue of the service itself.
        min_ping_interval_s: a client that asks more often whether a quiet connection is alive loses it. Ours ask every 30 s, and
            sessions may be quiet for ever; gRPC's own limit is five minutes.
    """

    def __init__(
        self,
        address: Address,
        security: ServerSecurity,
        services: Sequence[str],
        *,
        max_message_bytes: int = 16 << 20,
        admin_services: tuple[str, ...] = (),
        shares_port: bool = False,
        max_concurrent_calls: int = 4096,
        min_ping_interval_s: float = 10.0,
    ):
        security.check_listen(address)
        self.address = address
        self._security = security
        self._services = tuple(services)
        self._lock: IO[str] | None = None
        self._stop_requested = asyncio.Event()
        self.grpc = grpc.aio.server(
            interceptors=[TokenInterceptor(security, admin_services), ErrorInterceptor()],
            maximum_concurrent_rpcs=max_concurrent_calls,
            options=[
                ("grpc.so_reuseport", int(shares_port)),  # on: a second server on the port takes half of the connections
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.max_concurrent_streams", 1024),
                ("grpc.keepalive_time_ms", 60_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * min_ping_interval_s)),
            ],
        )
        self.health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        names = (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)

    async def start(self, *, serving: bool = True) -> None:
        """Binds, starts and reports SERVING, or NOT_SERVING until set_serving for a service that has yet to load something.

        Raises:
            StartupError: the address is in use or cannot be bound.
        """
        if self.address.socket_path is not None:
            self._lock = lock_socket(self.address.socket_path)
        credentials = self._security.credentials()
        try:
            if credentials is not None:
                port = self.grpc.add_secure_port(self.address.target, credentials)
            else:
                port = self.grpc.add_insecure_port(self.address.target)
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {self.address.target}: the address is in use or cannot be bound") from error
        if self.address.target.endswith(":0"):
            self.address = Address(f"{self.address.target.rpartition(':')[0]}:{port}")
        await self.set_serving(serving)
        await self.grpc.start()

    async def set_serving(self, serving: bool) -> None:
        """What health checks hear, for the server as a whole and for each of its services."""
        for name in ("", *self._services):
            await self.health.set(name, _SERVING if serving else _NOT_SERVING)

    def request_stop(self) -> None:
        """Makes wait_for_stop return."""
        self._stop_requested.set()

    async def wait_for_stop(self) -> None:
        """Returns on SIGTERM, SIGINT or request_stop."""
        await stop_signal(self._stop_requested)

    async def stop(self, grace_s: float) -> None:
        """Reports NOT_SERVING, refuses new calls, lets running ones finish for grace_s, then ends them."""
        await self.set_serving(False)
        await self.grpc.stop(grace_s)
        if self._lock is not None:
            self._lock.close()
