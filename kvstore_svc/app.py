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
from kvstore_svc.admin import ADMIN_SERVICE, KvStoreAdminService
from kvstore_svc.core.admission import Admission
from kvstore_svc.core.block_store import BlockStore
from kvstore_svc.handover import HandoverServer
from kvstore_svc.metrics import serve_metrics
from kvstore_svc.service import KvStoreService
from kvstore_svc.settings import KvStoreSettings
from kvstore_svc.tiers.absent import AbsentTier
from kvstore_svc.tiers.base import LowerTier
from kvstore_svc.tiers.disk import DiskTier, open_disk_tier
from kvstore_svc.tiers.disk_folder import DiskUnavailable
from kvstore_svc.tiers.inventory import Inventory
from kvstore_svc.tiers.redis_tier import RedisConfig, RedisTier
from kvstore_svc.tiers.shm import ShmTier, create_slabs
from kvstore_svc.tiers.stack import TierStack
from kvstore_svc.tiers.throttled import throttled
from octavo.kvstore.v1 import kv_store_admin_service_pb2_grpc as admin_pb_grpc
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from octavo.kvstore.v1 import kv_store_service_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)
# For a while after their blocks are gone; 200 bytes each.
_MAX_REMEMBERED_KEYS = 1 << 18
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
        rpc = RpcServer(settings.address(), settings.security(), [SERVICE, ADMIN_SERVICE], max_message_bytes=MAX_MESSAGE_BYTES)
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
        disk = _disk_tier(settings, clock, degraded) if settings.disk_capacity_bytes != 0 else None
        if disk is not None:
            closing.push_async_callback(disk.close)
            lower.append(disk)
        if settings.redis_url.get_secret_value():
            redis = RedisTier(_redis_config(settings), clock=clock, degraded=degraded)
            closing.push_async_callback(redis.close)
            lower.append(redis)
        admission = {"disk": Admission(settings.disk_admission_touches, _MAX_REMEMBERED_KEYS)}
        tiers = TierStack(
            shm,
            throttled(lower, settings.throttles(), clock),
            clock=clock,
            degraded=degraded,
            admission=admission,
            limits=settings.read_limits(),
        )
        closing.push_async_callback(tiers.close)
        service = KvStoreService(tiers, handover, clock, session_ttl_s=settings.session_ttl_s, heartbeat_s=settings.heartbeat_s)
        pb_grpc.add_KvStoreServiceServicer_to_server(service, rpc.grpc)
        inventory = Inventory(tiers, disk if isinstance(disk, DiskTier) else None)
        admin_pb_grpc.add_KvStoreAdminServiceServicer_to_server(KvStoreAdminService(inventory, clock), rpc.grpc)
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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.grace_s):
                await tiers.settle()
        background.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await background


def _disk_tier(settings: KvStoreSettings, clock: Clock, degraded: DegradedPaths) -> DiskTier | AbsentTier:
    """The disk tier, or what says why there is none."""
    try:
        disk = open_disk_tier(
            settings.disk_folder(),
            settings.address().target,
            capacity_bytes=settings.disk_capacity_bytes,
            segment_bytes=settings.disk_segment_bytes,
            clock=clock,
            degraded=degraded,
        )
    except DiskUnavailable as error:
        degraded.note("kvstore_disk", f"no disk tier: {error}")
        return AbsentTier("disk", str(error))
    counts = disk.counts()
    log.info(
        "disk tier %s: %d blocks, %d of %d bytes; headers of %d segments were read",
        settings.disk_folder(), counts.num_blocks, counts.used_bytes, counts.capacity_bytes, disk.num_scanned_segments,
    )  # fmt: skip
    return disk


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
