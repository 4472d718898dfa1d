"""The executor's way to the block store: saves and loads blocks, and never fails harder than by not having them.

Knows keys and when to open a session. Does not know devices, tensors or requests. Confined to one thread (the
executor's transfer thread); only the heartbeat runs beside it.

A store that is dead, slow, full or restarted makes save and load report what they could not do. The session is opened again
by a later call, after a pause that grows to two seconds.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from common.degraded import DegradedPaths
from common.errors import OctavoError, StaleEpoch
from common.patience import Patience
from common.rpc.address import Address
from common.rpc.channel import ChannelSecurity, sync_channel
from common.rpc.status import from_rpc_error
from common.shm.attachment import SlabUser
from executor_svc.clients.kvstore_report import CORRUPT, LoadReport, SaveReport
from executor_svc.clients.kvstore_session import CALL_TIMEOUT_S, SessionSpec, StoreSession, Transport
from executor_svc.clients.kvstore_transfer import Keys, Statuses, Transfer, transfer_of
from executor_svc.core.host_block import BlockSink, BlockSource
from octavo.kvstore.v1 import kv_store_service_pb2 as pb

__all__ = ["BlockStoreClient", "LoadReport", "SaveReport"]

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_OPEN_TIMEOUT_S = 0.5
ResultT = TypeVar("ResultT")


class BlockStoreClient:
    """See the module's first lines. Connects with the first save or load.

    Args:
        address: of the store.
        client_id: for the store's log and statistics.
        layout_fingerprint: 32 bytes, what a block's bytes mean.
        block_bytes: bytes of each block.
        transport: "auto" uses shared memory if it can; "shm" never goes inline.
        degraded: counts kvstore_unavailable, kvstore_inline, kvstore_full and kvstore_corrupt.
        security: how to reach a protected store.
        slab_user: told which shared memory is mapped.
    """

    def __init__(
        self,
        address: Address,
        *,
        client_id: str,
        layout_fingerprint: bytes,
        block_bytes: int,
        transport: Transport,
        degraded: DegradedPaths,
        security: ChannelSecurity | None = None,
        slab_user: SlabUser | None = None,
    ):
        security = security or ChannelSecurity()
        self._spec = SessionSpec(client_id, layout_fingerprint, block_bytes, transport, security, slab_user)
        self._degraded = degraded
        self._channel = sync_channel(address, security)
        self._session: StoreSession | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._retry_at_s = 0.0
        self._reason = "not connected yet"

    @property
    def transport(self) -> tuple[str, str]:
        """("shm" | "inline" | "none", why it is not shared memory). May be read from any thread."""
        session = self._session
        if session is None:
            return "none", self._reason
        return ("shm", "") if session.attachment is not None else ("inline", session.inline_reason)

    def connect(self, timeout_s: float) -> None:
        """Opens a session, so that transport says how blocks will travel; a store that is not there is found later."""
        self._open_session(timeout_s)

    def look_after(self) -> None:
        """Opens a session again that has ended: a load would not have the time for it."""
        self._open_session(_OPEN_TIMEOUT_S)

    def save(self, keys: Keys, source: BlockSource) -> SaveReport:
        """Writes the blocks that the store does not have.

        Args:
            keys: of the blocks.
            source: has their bytes, by position in keys; they must not change meanwhile.

        Raises:
            ValueError: the source has blocks of another size.
        """
        self._check(source)
        if not keys:
            return SaveReport()
        statuses = self._with_session(lambda transfer: transfer.save(keys, source), CALL_TIMEOUT_S)
        if statuses is None:
            return SaveReport(num_failed=len(keys), reason=self._reason)
        return self._saved(statuses)

    def load(self, keys: Keys, sink: BlockSink, patience: Patience) -> LoadReport:
        """Reads leading blocks, up to the first that is not there.

        Args:
            keys: of the blocks.
            sink: takes their bytes, by position in keys; what is in the blocks that are not loaded is undefined.
            patience: a store that needs longer counts as one that has no more blocks.

        Raises:
            ValueError: the sink has blocks of another size.
        """
        self._check(sink)
        if not keys:
            return LoadReport()
        started_s = time.monotonic()
        report = self._with_session(lambda transfer: transfer.load(keys, sink, patience), patience.seconds(0))
        if report is None:
            report = LoadReport(reason=self._reason)
        elif report.reason == CORRUPT:
            self._degraded.note("kvstore_corrupt", CORRUPT)
        elif report.num_loaded < len(keys):
            report.reason = report.reason or "not in the store"
        report.seconds = time.monotonic() - started_s
        return report

    def close(self) -> None:
        """Gives the session back."""
        if self._session is not None:
            self._session.close()
            self._session = None
        self._reason = "closed"
        self._channel.close()

    def _saved(self, statuses: Statuses) -> SaveReport:
        report = SaveReport()
        for status in statuses:
            if status == pb.BLOCK_STATUS_OK:
                report.num_written += 1
            elif status in (pb.BLOCK_STATUS_PRESENT, pb.BLOCK_STATUS_BUSY):
                report.num_present += 1
            else:
                report.num_failed += 1
                report.reason = "STORE_FULL" if status == pb.BLOCK_STATUS_FULL else pb.BlockStatus.Name(status)
        if report.reason == "STORE_FULL":
            self._degraded.note("kvstore_full", "everything in the store is held")
        elif report.num_written:
            self._degraded.clear("kvstore_full")
        return report

    def _with_session(self, work: Callable[[Transfer], ResultT], timeout_s: float) -> ResultT | None:
        """Runs work in a session, and once more in a new one if the store does not know the first any more.

        Returns:
            What work returned; None: it failed, and self._reason says why.
        """
        for is_last in (False, True):
            session = self._open_session(timeout_s)
            if session is None:
                return None
            try:
                result = work(transfer_of(session))
            except (grpc.RpcError, OctavoError) as error:
                known = from_rpc_error(error) if isinstance(error, grpc.RpcError) else error
                self._drop(known.message)
                if isinstance(known, StaleEpoch) and not is_last:
                    continue
                self._pause(known)
                return None
            except BaseException:
                self._drop("a save or load was broken off")  # or what it held would be held for ever
                raise
            self._degraded.clear("kvstore_unavailable")
            return result
        raise AssertionError("the last attempt returns")

    def _open_session(self, timeout_s: float) -> StoreSession | None:
        if self._session is not None and self._session.has_ended.is_set():
            self._drop("the session ended")
        if self._session is not None:
            return self._session
        if time.monotonic() < self._retry_at_s:
            return None
        try:
            self._session = StoreSession.open(self._channel, self._spec, min(timeout_s, CALL_TIMEOUT_S))
        except (grpc.RpcError, OctavoError) as error:
            self._pause(from_rpc_error(error) if isinstance(error, grpc.RpcError) else error)
            return None
        self._degraded.clear("kvstore_unavailable")
        self._pause_s = _FIRST_PAUSE_S
        if self._session.attachment is None and self._spec.transport == "auto":
            self._degraded.note("kvstore_inline", self._session.inline_reason)
        else:
            self._degraded.clear("kvstore_inline")
        return self._session

    def _drop(self, reason: str) -> None:
        if self._session is not None:
            self._session.abandon()
        self._session = None
        self._reason = reason

    def _pause(self, error: OctavoError) -> None:
        self._reason = error.message
        self._degraded.note("kvstore_unavailable", error.message)
        self._retry_at_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _check(self, blocks: BlockSink | BlockSource) -> None:
        if blocks.block_bytes != self._spec.block_bytes:
            raise ValueError(f"blocks of {blocks.block_bytes} bytes: this session's have {self._spec.block_bytes}")
