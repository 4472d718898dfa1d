"""A tier below shared memory, seen over gRPC: the wire names it, waits for it in time, and takes leases back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.clock import MonotonicClock
from common.degraded import DegradedPaths
from common.ids import Epoch
from common.rpc.address import Address
from common.rpc.channel import aio_channel
from common.rpc.security import ServerSecurity
from common.rpc.server import RpcServer
from common.shm.checksum import checksum
from common.shm.slab import PAGE_BYTES
from kvstore_svc.app import SERVICE
from kvstore_svc.core.block import Layout
from kvstore_svc.handover import HandoverServer
from kvstore_svc.service import KvStoreService
from kvstore_svc.tiers.base import StoredBlock
from kvstore_svc.tiers.shm import ShmTier, create_slabs
from kvstore_svc.tiers.stack import TierStack
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from octavo.kvstore.v1 import kv_store_service_pb2_grpc as pb_grpc
from tests.integration.kvstore_svc.store_process import FINGERPRINT, key
from tests.unit.kvstore_svc.tiers.memory_tier import MemoryTier

EPOCH = Epoch(11)


@dataclass
class Rig:
    """A store in this process, with a tier below, and a session of a client."""

    stub: "pb_grpc.KvStoreServiceAsyncStub"
    tier: MemoryTier
    tiers: TierStack
    session_id: str

    def put_below(self, *numbers: int) -> None:
        for number in numbers:
            data = bytes([number]) * PAGE_BYTES
            stored = StoredBlock(key(number), Layout(FINGERPRINT, PAGE_BYTES), checksum(data))
            self.tier.blocks[key(number)] = (stored, bytearray(data))

    def acquisition(self, *numbers: int, wait_s: float = 20.0) -> pb.AcquireBlocksRequest:
        request = pb.AcquireBlocksRequest(
            session_id=self.session_id, epoch=EPOCH, keys=[key(n) for n in numbers], prefix_only=True
        )
        request.max_wait.FromMilliseconds(int(1000 * wait_s))
        return request


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    clock = MonotonicClock()
    tier = MemoryTier("disk")
    with closing(ShmTier(create_slabs(8 * PAGE_BYTES, 8 * PAGE_BYTES, EPOCH), EPOCH, session_ttl_s=60, quarantine_s=60)) as shm:
        tiers = TierStack(shm, [tier], clock=clock, degraded=DegradedPaths())
        handover = HandoverServer(tmp_path / "kv.shm", frozenset({0}), clock)
        server = RpcServer(Address(f"unix:{tmp_path}/kv.sock"), ServerSecurity(), [SERVICE])
        service = KvStoreService(tiers, handover, clock, session_ttl_s=60, heartbeat_s=1)
        pb_grpc.add_KvStoreServiceServicer_to_server(service, server.grpc)
        await server.start()
        async with aio_channel(server.address) as channel:
            stub: pb_grpc.KvStoreServiceAsyncStub = pb_grpc.KvStoreServiceStub(channel)
            layout = pb.Layout(fingerprint=FINGERPRINT, block_bytes=PAGE_BYTES)
            opened = await stub.OpenSession(pb.OpenSessionRequest(client_id="raw", layout=layout, transport=pb.TRANSPORT_INLINE))
            yield Rig(stub, tier, tiers, opened.session_id)
        service.stop()
        await server.stop(0)
        await tiers.close()
        shm.store.check_integrity()


async def test_lookup_and_acquire_name_the_tier_that_had_the_block(rig: Rig) -> None:
    rig.put_below(1, 2)

    looked_up = await rig.stub.LookupBlocks(pb.LookupBlocksRequest(keys=[key(1), key(2), key(3)]))
    results = [r async for response in rig.stub.AcquireBlocks(rig.acquisition(1, 2, 3)) for r in response.results]

    assert list(looked_up.tiers) == [pb.TIER_DISK, pb.TIER_DISK]
    assert [r.status for r in results] == [pb.BLOCK_STATUS_OK, pb.BLOCK_STATUS_OK, pb.BLOCK_STATUS_MISS]
    assert [r.tier for r in results[:2]] == [pb.TIER_DISK, pb.TIER_DISK]
    again = await rig.stub.LookupBlocks(pb.LookupBlocksRequest(keys=[key(1), key(2)]))
    assert list(again.tiers) == [pb.TIER_SHM, pb.TIER_SHM]


async def test_blocks_from_below_come_inline_too(rig: Rig) -> None:
    rig.put_below(1)
    request = pb.GetBlocksRequest(session_id=rig.session_id, epoch=EPOCH, keys=[key(1), key(2)])
    request.max_wait.FromSeconds(20)

    first, end = [chunk async for chunk in rig.stub.GetBlocks(request)]

    assert (first.tier, first.data) == (pb.TIER_DISK, b"\1" * PAGE_BYTES)
    assert (end.key_index, end.status) == (1, pb.BLOCK_STATUS_MISS)


async def test_a_tier_slower_than_max_wait_is_a_miss(rig: Rig) -> None:
    rig.put_below(1)
    rig.tier.gate.clear()

    results = [r async for response in rig.stub.AcquireBlocks(rig.acquisition(1, wait_s=0)) for r in response.results]

    assert [r.status for r in results] == [pb.BLOCK_STATUS_MISS]


async def test_a_call_that_is_cancelled_takes_its_leases_back(rig: Rig) -> None:
    rig.put_below(1, 2)
    async for _ in rig.stub.AcquireBlocks(rig.acquisition(1)):
        pass
    session = next(s for s in rig.tiers.shm.store.sessions.values() if s.session_id == rig.session_id)
    assert len(session.leases) == 1
    rig.tier.gate.clear()
    call = rig.stub.AcquireBlocks(rig.acquisition(1, 2))
    first = await call.read()
    assert isinstance(first, pb.AcquireBlocksResponse)
    assert len(session.leases) == 2

    call.cancel()

    async with asyncio.timeout(20):
        while len(session.leases) > 1:
            await asyncio.sleep(0.01)
    rig.tier.gate.set()
    stats = await rig.stub.GetStats(pb.GetStatsRequest())
    assert [tier.tier for tier in stats.tiers] == [pb.TIER_SHM, pb.TIER_DISK]


async def test_what_is_written_goes_down(rig: Rig) -> None:
    data = b"\7" * PAGE_BYTES
    chunk = pb.PutBlocksRequest(
        session_id=rig.session_id, epoch=EPOCH, key=key(7), block_bytes=PAGE_BYTES, checksum=checksum(data), data=data
    )

    response = await rig.stub.PutBlocks(iter([chunk]))

    assert list(response.statuses) == [pb.BLOCK_STATUS_OK]
    await rig.tiers.settle()
    assert bytes(rig.tier.blocks[key(7)][1]) == data
