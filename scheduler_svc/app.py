"""Puts scheduler_svc together and runs it until it is told to stop. The only place that knows every part."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from prometheus_client import start_http_server

from common.clock import MonotonicClock
from common.cpu_cores import usable_cores
from common.degraded import DegradedPaths
from common.errors import StartupError
from common.model_spec import public_name
from common.rpc.address import Address
from common.rpc.channel import ChannelSecurity
from common.rpc.server import RpcServer
from scheduler_svc.clients.executor import ExecutorConnector, GrpcExecutor
from scheduler_svc.clients.kvstore import BlockStoreLookup
from scheduler_svc.edge.admin import AdminServicer
from scheduler_svc.edge.inference import InferenceServicer
from scheduler_svc.edge.models import ModelServicer
from scheduler_svc.edge.pacing import Pacing
from scheduler_svc.edge.preparation import Preparation
from scheduler_svc.engine import Engine
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.metrics import EngineMetrics
from scheduler_svc.service import ADMIN, SERVICES, add_servicers
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.text.model_text import ModelText

log = logging.getLogger(__name__)


class App:
    """A running scheduler.

    Attributes:
        server: of the public API; its address has the port that was chosen.
        engine: all executors.
    """

    def __init__(self, server: RpcServer, engine: Engine, grace_s: float):
        self.server = server
        self.engine = engine
        self._grace_s = grace_s

    async def drain(self) -> None:
        """NOT_SERVING, no new requests; returns when the running ones are done or the grace time is over."""
        await self.server.set_serving(False)
        self.engine.begin_drain()
        log.info("stopping: %d requests get %.0f s to finish", self.engine.num_open_requests, self._grace_s)
        try:
            async with asyncio.timeout(self._grace_s):
                await self.engine.wait_idle()
        except TimeoutError:
            log.warning("stopping: %d requests did not finish in time", self.engine.num_open_requests)


def engine_config(settings: SchedulerSettings) -> EngineConfig:
    """The engine's part of the settings."""
    return EngineConfig(
        max_chunk_tokens=settings.max_chunk_tokens,
        max_waiting_requests=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        prefix_caching=settings.prefix_caching,
        run_ahead=settings.run_ahead,
        executor_wait_s=settings.executor_wait_s,
        executor_lost_timeout_s=settings.executor_lost_timeout_s,
        step_timeout_s=settings.step_timeout_s,
        store_lookup_timeout_s=settings.store_lookup_timeout_s,
        store_load_timeout_s=settings.store_load_timeout_s,
    )


def _connectors(settings: SchedulerSettings, degraded: DegradedPaths) -> list[ExecutorConnector]:
    security = ChannelSecurity(tls_ca=settings.executor_tls_ca, token=settings.executor_token.get_secret_value())
    noted = degraded if settings.executor_transport == "auto" else None
    return [GrpcExecutor(Address.parse(text), security, noted) for text in settings.executors]


def _store(settings: SchedulerSettings, degraded: DegradedPaths) -> BlockStoreLookup:
    security = ChannelSecurity(tls_ca=settings.kvstore_tls_ca, token=settings.kvstore_token.get_secret_value())
    return BlockStoreLookup(Address.parse(settings.kvstore) if settings.kvstore else None, degraded, security)


@asynccontextmanager
async def running_app(settings: SchedulerSettings, connectors: Sequence[ExecutorConnector] | None = None) -> AsyncIterator[App]:
    """The scheduler from its start to its end.

    Args:
        settings: all of them.
        connectors: how to reach executors; None: those of the settings.

    Raises:
        StartupError: an address cannot be bound, a file cannot be read.
    """
    security = settings.security()
    address = Address.parse(settings.listen)
    security.check_listen(address)
    text = ModelText.load(settings.model, settings.model_name or None)
    degraded = DegradedPaths()
    metrics = EngineMetrics()
    model_name = public_name(settings.model_name) if settings.model_name else ""
    clock = MonotonicClock()
    store = _store(settings, degraded)
    engine = Engine(
        _connectors(settings, degraded) if connectors is None else connectors, engine_config(settings), clock, store, degraded,
        model_name=model_name, observe=metrics.observe,
    )  # fmt: skip
    metrics.engine = engine
    preparation = Preparation(text, clock, settings.cache_salt.get_secret_value())
    server = RpcServer(address, security, SERVICES, max_message_bytes=settings.max_message_bytes, admin_services=(ADMIN,))
    admin = AdminServicer(engine, store, settings.shown(), settings.kvstore)
    inference = InferenceServicer(engine, text, preparation, Pacing(usable_cores()))
    add_servicers(server, inference, ModelServicer(engine, text, model_name), admin)
    stop_metrics = _serve_metrics(settings.metrics_listen, metrics)
    try:
        await engine.start()
        await server.start()
        log.info("listening on %s", server.address.target)
        yield App(server, engine, settings.grace_s)
    finally:
        await engine.stop()
        await server.stop(0.5)  # ended requests get to tell their callers
        await store.close()
        text.close()
        stop_metrics()


def _serve_metrics(listen: str, metrics: EngineMetrics) -> Callable[[], None]:
    if not listen:
        return lambda: None
    host, _, port = Address.parse(listen).target.rpartition(":")
    try:
        http, thread = start_http_server(int(port), host.strip("[]"), metrics.registry)
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot serve metrics on {listen}: {error}") from error

    def stop() -> None:
        http.shutdown()
        http.server_close()
        thread.join()

    return stop


async def serve(settings: SchedulerSettings) -> None:
    """Runs until SIGTERM or SIGINT, then finishes what is running within grace_s."""
    async with running_app(settings) as app:
        await app.server.wait_for_stop()
        await app.drain()
