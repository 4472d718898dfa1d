"""The gRPC face of the inventory: each method checks, calls it and converts. Decides nothing."""

from collections.abc import AsyncIterator

from common.clock import Clock
from kvstore_svc import convert
from kvstore_svc.service import INLINE_CHUNK_BYTES, Context
from kvstore_svc.tiers.inventory import Inventory, Verification
from octavo.kvstore.v1 import kv_store_admin_service_pb2 as pb
from octavo.kvstore.v1 import kv_store_admin_service_pb2_grpc as pb_grpc

ADMIN_SERVICE = pb.DESCRIPTOR.services_by_name["KvStoreAdminService"].full_name
_PROGRESS_S = 0.2


class KvStoreAdminService(pb_grpc.KvStoreAdminServiceServicer):
    """octavo.kvstore.v1.KvStoreAdminService.

    Args:
        inventory: what looks after the blocks.
        clock: for the pace of progress.
    """

    def __init__(self, inventory: Inventory, clock: Clock):
        self._inventory = inventory
        self._clock = clock

    async def ListLayouts(self, request: pb.ListLayoutsRequest, context: Context) -> pb.ListLayoutsResponse:  # noqa: N802
        """See the proto."""
        response = pb.ListLayoutsResponse()
        for name, layouts in self._inventory.layouts().items():
            for layout, num_blocks in layouts.items():
                response.layouts.add(layout=convert.layout_to_pb(layout), tier=convert.TIERS[name], num_blocks=num_blocks)
        return response

    async def PersistBlocks(self, request: pb.PersistBlocksRequest, context: Context) -> pb.PersistBlocksResponse:  # noqa: N802
        """See the proto."""
        return pb.PersistBlocksResponse(durable=await self._inventory.persist(convert.keys_from_pb(request.keys)))

    async def VerifyBlocks(  # noqa: N802
        self, request: pb.VerifyBlocksRequest, context: Context
    ) -> AsyncIterator[pb.VerifyBlocksResponse]:
        """See the proto."""
        said_s = self._clock.now()
        progress = Verification(0)
        async for progress in self._inventory.verify(request.layout_fingerprint or None):
            if self._clock.now() - said_s > _PROGRESS_S:
                said_s = self._clock.now()
                yield _progress(progress)
        yield _progress(progress)

    async def ExportBlocks(  # noqa: N802
        self, request: pb.ExportBlocksRequest, context: Context
    ) -> AsyncIterator[pb.ExportBlocksResponse]:
        """See the proto."""
        chosen = self._inventory.chosen(convert.keys_from_pb(request.keys), request.layout_fingerprint or None)
        if not chosen:
            yield pb.ExportBlocksResponse()
        for stored in chosen:
            data = await self._inventory.read(stored)
            if data is None:
                continue
            for start in range(0, len(data), INLINE_CHUNK_BYTES):
                chunk = pb.ExportBlocksResponse(num_blocks=len(chosen), data=bytes(data[start : start + INLINE_CHUNK_BYTES]))
                if start == 0:
                    chunk.key, chunk.checksum = stored.key, stored.checksum
                    chunk.layout.CopyFrom(convert.layout_to_pb(stored.layout))
                yield chunk


def _progress(progress: Verification) -> pb.VerifyBlocksResponse:
    return pb.VerifyBlocksResponse(
        num_blocks=progress.num_blocks,
        num_checked=progress.num_checked,
        num_checked_bytes=progress.num_checked_bytes,
        num_bad=progress.num_bad,
    )
