"""One load through shared memory: leases come in groups, bytes follow, leases go back.

Knows handles, generations and leases. Does not know how bytes travel (executor_svc/core/host_block.py) nor sessions' lives. The
bytes of one group travel while the leases of the next are on their way, and while those of the last go back.
"""

from collections import deque
from collections.abc import Sequence
from itertools import groupby

import grpc

from common.errors import OctavoError
from common.shm.attachment import Attachment
from executor_svc.clients.call_deadline import CallDeadline
from executor_svc.clients.kvstore_report import CORRUPT, TIER_NAMES, LoadReport
from executor_svc.clients.kvstore_session import CALL_TIMEOUT_S, StoreSession
from executor_svc.core.host_block import Filling, HostBlock
from octavo.kvstore.v1 import kv_store_service_pb2 as pb

_RELEASED_AT_ONCE = 64
"""Leases go back while others still come, so many at a time: the store may need the room for blocks from lower tiers."""


class ShmLoad:
    """See the module's first lines.

    Attributes:
        report: what has become of the blocks so far.
    """

    def __init__(self, session: StoreSession, attachment: Attachment, filling: Filling, block_bytes: int, deadline: CallDeadline):
        """Begins.

        Args:
            session: whose leases come.
            attachment: its slabs.
            filling: takes the bytes; stays the caller's to close, before finish.
            block_bytes: of each block.
            deadline: of the call that brings the leases.
        """
        self.report = LoadReport()
        self._session = session
        self._attachment = attachment
        self._filling = filling
        self._block_bytes = block_bytes
        self._deadline = deadline
        self._held: deque[pb.BlockResult] = deque()
        """Leased, and their bytes are under way."""
        self._release = pb.ReleaseBlocksRequest(session_id=session.session_id, epoch=session.epoch)

    def run(self) -> None:
        """Takes all groups and waits for their bytes.

        Raises:
            grpc.RpcError: the call failed.
            OctavoError: a handle points nowhere.
        """
        responses = self._deadline.responses()
        try:
            while True:
                while self._filling.is_under_way and not self._is_over and not self._deadline.has_news:
                    self._settle()
                response = next(responses, None)
                if response is None:
                    break
                self._add([result for result in response.results if result.status == pb.BLOCK_STATUS_OK])
        except grpc.RpcError:
            self._settle_all()
            raise
        self._settle_all()

    def finish(self) -> None:
        """Gives back all leases that are left; nothing reads their bytes any more."""
        self._release.lease_ids.extend(result.handle.lease_id for result in self._held)
        self._held.clear()
        if self._release.lease_ids:
            self._send()

    @property
    def _is_over(self) -> bool:
        """What comes from now on is of no use."""
        return bool(self.report.reason) or self._deadline.is_over

    def _add(self, results: Sequence[pb.BlockResult]) -> None:
        if not results:
            return
        if self._is_over:
            self._release.lease_ids.extend(result.handle.lease_id for result in results)
            return
        blocks = [HostBlock(result.key_index, self._view(result.handle), result.handle.checksum) for result in results]
        self._held.extend(results)
        self._filling.add(blocks)
        while self._filling.is_full and not self._is_over:
            self._settle()

    def _settle_all(self) -> None:
        while self._filling.is_under_way and not self._is_over:
            self._settle()

    def _settle(self) -> None:
        """Waits for the oldest bytes. A place's generation is looked at after its bytes were read."""
        verdicts = self._filling.verdicts()
        results = [self._held.popleft() for _ in verdicts]
        self._release.lease_ids.extend(result.handle.lease_id for result in results)
        if not self._is_over:  # they came together: the first that is in time makes time for the others
            num_good = self._num_good(results, verdicts)
            for tier, run in groupby(results[:num_good], key=_tier_of):
                num_blocks = len(list(run))
                self.report.add(TIER_NAMES[tier], self._deadline.extend(num_blocks), num_blocks)
        if len(self._release.lease_ids) >= _RELEASED_AT_ONCE:
            self._send()

    def _num_good(self, results: Sequence[pb.BlockResult], verdicts: Sequence[bool]) -> int:
        """How many leading blocks are what they should be; if not all, the report says why."""
        for index, (result, is_right) in enumerate(zip(results, verdicts, strict=True)):
            handle = result.handle
            place = (handle.slab_id, handle.offset_bytes, handle.length_bytes)
            if not self._attachment.has_generation(*place, handle.generation):
                self.report.reason = "the block's place was given to another block"
                return index
            if not is_right:
                self.report.reason = CORRUPT
                self._release.suspect_lease_ids.append(handle.lease_id)
                return index
        return len(results)

    def _send(self) -> None:
        """Nobody waits for the answer: the blocks are on the device, and who has no time left does not wait in any case."""
        session, release = self._session, self._release
        self._release = pb.ReleaseBlocksRequest(session_id=session.session_id, epoch=session.epoch)
        sent = session.stub.ReleaseBlocks.future(release, timeout=CALL_TIMEOUT_S, metadata=session.metadata)
        sent.add_done_callback(self._end_unless_done)

    def _end_unless_done(self, release: "grpc.Future[pb.ReleaseBlocksResponse]") -> None:
        """Leases that were not given back go with their session."""
        if release.cancelled() or release.exception() is not None:
            self._session.has_ended.set()

    def _view(self, handle: pb.BlockHandle) -> memoryview:
        return block_view(self._attachment, handle, self._block_bytes)


def _tier_of(result: pb.BlockResult) -> "pb.Tier.ValueType":
    return result.tier


def block_view(attachment: Attachment, handle: pb.BlockHandle, num_bytes: int) -> memoryview:
    """The memory of a handle.

    Raises:
        OctavoError: it points outside of the slabs, or has another length than blocks have.
    """
    view = attachment.view(handle.slab_id, handle.offset_bytes, handle.length_bytes)
    if view is None or handle.length_bytes != num_bytes:
        raise OctavoError(f"the store sent a handle of {handle.length_bytes} bytes at {handle.offset_bytes}, wanted {num_bytes}")
    return view
