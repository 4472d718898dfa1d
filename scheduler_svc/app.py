"""Puts scheduler_svc together and runs it until it is told to stop. The only place that knows every part."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from prometheus_client import start_http_server

from common.clock import MonotonicClock
from common.degraded import DegradedPaths
from common.errors import StartupError
from common.model_spec import public_name
from common.rpc.address import Address
from common.rpc.channel import ChannelSecurity
from common.rpc.server import stop_signal
from scheduler_svc.administration import EngineAdministration
from scheduler_svc.clients.executor import ExecutorConnector, GrpcExecutor
from scheduler_svc.clients.kvstore import BlockStoreLookup
from scheduler_svc.core.tenants import EQUALS, Tenants
from scheduler_svc.core_maker import CoreMaker, PlainCores, RecordedCores
from scheduler_svc.edge_line.processes import Launch, launch_process
from scheduler_svc.edge_wiring import OwnEdge, SeparateEdge
from scheduler_svc.engine import Engine
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.metrics import EngineMetrics
from scheduler_svc.prewarmer import Prewarmer
from scheduler_svc.recording.recorder import Recorder, RecorderLimits
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.tenants_file import read_tenants

log = logging.getLogger(__name__)


class PublicEdge(Protocol):
    """What serves the public API, in this process or in others."""

    @property
    def address(self) -> Address:
        """With the port that was chosen."""
        ...

    async def start(self) -> None:
        """Listens.

        Raises:
            StartupError: the address cannot be bound.
        """
        ...

    async def drain(self) -> None:
        """Health says NOT_SERVING."""
        ...

    async def stop(self) -> None:
        """Ends. The engine's requests have ended before; their callers are told."""
        ...


class App:
    """A running scheduler.

    Attributes:
        edge: of the public API.
        engine: all executors.
    """

    def __init__(self, edge: PublicEdge, engine: Engine, grace_s: float):
        self.edge = edge
        self.engine = engine
        self._grace_s = grace_s

    @property
    def address(self) -> Address:
        """Of the public API, with the port that was chosen."""
        return self.edge.address

    async def drain(self) -> None:
        """NOT_SERVING, no new requests; returns when the running ones are done or the grace time is over."""
        await self.edge.drain()
        self.engine.begin_drain()
        log.info("stopping: %d requests get %.0f s to finish", self.engine.num_open_requests, self._grace_s)
        try:
            async with asyncio.timeout(self._grace_s):
                await self.engine.wait_idle()
        except TimeoutError:
            log.warning("stopping: %d requests did not finish in time", self.engine.num_open_requests)


def engine_config(settings: SchedulerSettings, tenants: Tenants = EQUALS) -> EngineConfig:
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
        policy=settings.policy,
        tenants=tenants,
        max_wait_s=settings.max_wait_s,
    )


def _connector(settings: SchedulerSettings, degraded: DegradedPaths) -> Callable[[Address], ExecutorConnector]:
    """How an executor is reached, by its address."""
    security = ChannelSecurity(tls_ca=settings.executor_tls_ca, token=settings.executor_token.get_secret_value())
    noted = degraded if settings.executor_transport == "auto" else None
    return lambda address: GrpcExecutor(address, security, noted)


def _cores(settings: SchedulerSettings, degraded: DegradedPaths) -> tuple[Callable[[str], CoreMaker], Callable[[], None]]:
    """What makes the core for an address, and what is to be done at the end."""
    if settings.record is None:
        return lambda address: PlainCores(), lambda: None
    limits = RecorderLimits(settings.record_segment_bytes, settings.record_max_bytes)
    recorder = Recorder(settings.record, degraded, limits)
    return lambda address: RecordedCores(recorder.recording(address)), recorder.close


def _store(settings: SchedulerSettings, degraded: DegradedPaths) -> BlockStoreLookup:
    security = ChannelSecurity(tls_ca=settings.kvstore_tls_ca, token=settings.kvstore_token.get_secret_value())
    return BlockStoreLookup(Address.parse(settings.kvstore) if settings.kvstore else None, degraded, security)


@asynccontextmanager
async def running_app(
    settings: SchedulerSettings, connectors: Sequence[ExecutorConnector] | None = None, launch: Launch = launch_process
) -> AsyncIterator[App]:
    """The scheduler from its start to its end.

    Args:
        settings: all of them.
        connectors: how to reach executors; None: those of the settings.
        launch: starts a process of the edge, where the settings want some.

    Raises:
        StartupError: an address cannot be bound, a file cannot be read.
    """
    tenants = read_tenants(settings.tenants)
    settings.security(tenants.tenant_of_token).check_listen(Address.parse(settings.listen))
    degraded = DegradedPaths()
    metrics = EngineMetrics()
    model_name = public_name(settings.model_name) if settings.model_name else ""
    clock = MonotonicClock()
    store = _store(settings, degraded)
    config = engine_config(settings, tenants.tenants)
    cores, end_recordings = _cores(settings, degraded)
    connector = _connector(settings, degraded)
    if connectors is None:
        connectors = [connector(Address.parse(text)) for text in settings.executors]
    engine = Engine(
        connectors, config, clock, store, degraded,
        model_name=model_name, observe=metrics.observe, cores=cores,
    )  # fmt: skip
    metrics.engine = engine
    administration = EngineAdministration(engine, store, settings.shown(), settings.kvstore, connector)
    edge: PublicEdge
    if num_processes := settings.edge_processes:
        edge = separate = SeparateEdge(settings, num_processes, engine, administration, degraded, launch)
        metrics.edges = lambda: separate.processes.sessions
    else:
        edge = OwnEdge(settings, engine, administration, clock)
    stop_metrics = _serve_metrics(settings.metrics_listen, metrics)
    prewarmer = Prewarmer(engine, store, clock, settings.prewarm_share)
    metrics.prewarmer = prewarmer
    prewarming = asyncio.create_task(prewarmer.run(), name="prewarmer") if settings.kvstore and settings.prewarm_share else None
    try:
        await engine.start()
        await edge.start()
        log.info("listening on %s", edge.address.target)
        yield App(edge, engine, settings.grace_s)
    finally:
        if prewarming is not None:
            prewarming.cancel()
            await asyncio.gather(prewarming, return_exceptions=True)
        await engine.stop()
        await edge.stop()
        await store.close()
        end_recordings()
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
        await stop_signal()
        await app.drain()
