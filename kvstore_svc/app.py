"""One page of wiring: what the block store consists of, how it starts and how it stops."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Coroutine

from common.clock import Clock, MonotonicClock
from common.degraded import DegradedPaths
from common.ids import Epoch
from common.rpc.channel import MAX_MESSAGE_BYTES
from common.rpc.server import RpcServer
from kvstore_svc.core.block_store import BlockStore
from kvstore_svc.handover import HandoverServer
from kvstore_svc.metrics import serve_metrics
from kvstore_svc.service import KvStoreService
from kvstore_svc.settings import KvStoreSettings
from kvstore_svc.tiers.base import LowerTier
from kvstore_svc.tiers.redis_tier import RedisConfig, RedisTier
from kvstore_svc.tiers.shm import ShmTier, create_slabs
from kvstore_svc.tiers.stack import TierStack
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from octavo.kvstore.v1 import kv_store_service_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)
SERVICE = pb.DESCRIPTOR.services_by_name["KvStoreService"].full_name


async def serve(settings: KvStoreSettings) -> None:
    """Runs the block store until SIGTERM.

    Raises:
        StartupError: an address or a socket is taken, or there is not enough memory.
    """
    clock = MonotonicClock()
    epoch = Epoch(secrets.randbits(64))
    async with contextlib.AsyncExitStack() as closing:
        handover = HandoverServer(settings.shm_socket_path(), settings.uids(), clock)
        closing.push_async_callback(handover.close)
        handover.bind()
        rpc = RpcServer(settings.address(), settings.security(), [SERVICE], max_message_bytes=MAX_MESSAGE_BYTES)
        shm = ShmTier(
            create_slabs(settings.capacity_bytes, settings.slab_bytes, epoch),
            epoch,
            session_ttl_s=settings.session_ttl_s,
            quarantine_s=settings.quarantine_s,
            max_events=settings.max_events,
        )
        closing.callback(shm.close)
        degraded = DegradedPaths()
        lower: list[LowerTier] = []
        if settings.redis_url.get_secret_value():
            redis = RedisTier(_redis_config(settings), clock=clock, degraded=degraded)
            closing.push_async_callback(redis.close)
            lower.append(redis)
        tiers = TierStack(shm, lower, clock=clock, degraded=degraded)
        closing.push_async_callback(tiers.close)
        service = KvStoreService(tiers, handover, clock, session_ttl_s=settings.session_ttl_s, heartbeat_s=settings.heartbeat_s)
        pb_grpc.add_KvStoreServiceServicer_to_server(service, rpc.grpc)
        serve_metrics(settings.metrics_listen, tiers)
        background = asyncio.create_task(
            _in_background(handover.serve(shm.store, shm.fds), _expire_forever(shm.store, clock, settings.heartbeat_s))
        )
        background.add_done_callback(lambda _: rpc.request_stop())
        await rpc.start()
        log.info(
            "listening on %s, shared memory %d bytes in %d slabs over %s",
            rpc.address.target, settings.capacity_bytes, len(shm.fds), handover.path,
        )  # fmt: skip
        await rpc.wait_for_stop()
        log.info("stopping")
        service.stop()
        await rpc.stop(settings.grace_s)
        background.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await background


def _redis_config(settings: KvStoreSettings) -> RedisConfig:
    return RedisConfig(
        url=settings.redis_url.get_secret_value(),
        num_connections=settings.redis_connections,
        ttl_s=settings.redis_ttl_s,
        timeout_s=settings.redis_timeout_s,
        lookup_timeout_s=settings.redis_lookup_timeout_s,
        off_s=settings.redis_off_s,
    )


async def _in_background(*forever: Coroutine[None, None, None]) -> None:
    """Runs what never ends; if one fails, all end with its error."""
    async with asyncio.TaskGroup() as group:
        for work in forever:
            group.create_task(work)


async def _expire_forever(store: BlockStore, clock: Clock, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        for session in store.expire(clock.now()):
            if session.is_leaked:
                log.error(
                    "session of %s: fenced, its process lives on and holds %d leases", session.client_id, len(session.leases)
                )
            else:
                log.warning("session of %s: no sign of life, fenced", session.client_id)
