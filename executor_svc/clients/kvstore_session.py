"""One session with the block store, from its opening to its first failure. Confined to the thread that opened it.

Knows the session's opening, transport, heartbeat and end. Does not know what travels in it, nor what to do when it fails:
whoever opened it closes it and opens another one.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import grpc

from common.errors import NoSharedMemory
from common.rpc.channel import ChannelSecurity
from common.shm.attachment import Attachment, SlabOffer, SlabUser
from common.shm.handover import HandoverRequest
from common.shm.host import host_id
from common.shm.slab import SHM_ABI
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from octavo.kvstore.v1 import kv_store_service_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)
Transport = Literal["auto", "shm", "inline"]
_TRANSPORTS = {"auto": pb.TRANSPORT_AUTO, "shm": pb.TRANSPORT_SHM, "inline": pb.TRANSPORT_INLINE}
CALL_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class SessionSpec:
    """Who asks, for which blocks.

    Attributes:
        client_id: for the store's log and statistics.
        layout_fingerprint: 32 bytes.
        block_bytes: bytes of each block.
        transport: "auto" falls back to the inline calls, "shm" does not.
        security: how to reach a protected store.
        slab_user: told which slabs are mapped.
    """

    client_id: str
    layout_fingerprint: bytes
    block_bytes: int
    transport: Transport
    security: ChannelSecurity
    slab_user: SlabUser | None = None


class StoreSession:
    """An open session.

    Attributes:
        stub: the store's calls; metadata goes with each.
        attachment: the mapped slabs; None: blocks travel inline.
        inline_reason: why inline; empty for shared memory.
        has_ended: set when the store said, or let show, that the session is gone.
    """

    def __init__(
        self,
        stub: pb_grpc.KvStoreServiceStub,
        opened: pb.OpenSessionResponse,
        metadata: tuple[tuple[str, str], ...],
        attachment: Attachment | None,
        inline_reason: str,
    ):
        self.stub = stub
        self.session_id = opened.session_id
        self.epoch = opened.epoch
        self.inline_chunk_bytes = opened.inline_chunk_bytes
        self.metadata = metadata
        self.attachment = attachment
        self.inline_reason = inline_reason
        self.has_ended = threading.Event()
        self._closing = threading.Event()
        self._heartbeat_s = opened.heartbeat.ToNanoseconds() / 1e9
        self._heartbeat = stub.KeepSession(self._beats(), metadata=metadata)
        self._thread = threading.Thread(target=self._listen, name="kvstore-heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, channel: grpc.Channel, spec: SessionSpec, timeout_s: float) -> "StoreSession":
        """Opens a session, maps the slabs if it can, and starts the heartbeat.

        Raises:
            grpc.RpcError: the store cannot be reached or refuses.
            NoSharedMemory: it cannot be had and spec.transport is "shm".
        """
        stub = pb_grpc.KvStoreServiceStub(channel)
        metadata = spec.security.metadata()
        opened = stub.OpenSession(
            pb.OpenSessionRequest(
                client_id=spec.client_id,
                host_id=host_id(),
                layout=pb.Layout(fingerprint=spec.layout_fingerprint, block_bytes=spec.block_bytes),
                transport=_TRANSPORTS[spec.transport],
                shm_abi=SHM_ABI,
            ),
            timeout=timeout_s,
            metadata=metadata,
        )
        attachment, reason = None, opened.inline_reason
        try:
            if opened.HasField("shm"):
                attachment = _attach(opened, timeout_s, spec.slab_user)
        except NoSharedMemory as error:
            reason = error.message
        session = cls(stub, opened, metadata, attachment, reason)
        if attachment is None and spec.transport == "shm":
            session.close()
            raise NoSharedMemory(reason)
        try:
            transport = pb.TRANSPORT_SHM if attachment is not None else pb.TRANSPORT_INLINE
            confirmation = pb.ConfirmSessionRequest(
                session_id=opened.session_id, epoch=opened.epoch, transport=transport, reason=reason
            )
            stub.ConfirmSession(confirmation, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError:
            session.abandon()
            raise
        return session

    def close(self) -> None:
        """Gives everything back in good order, as far as the store can be reached."""
        request = pb.CloseSessionRequest(session_id=self.session_id, epoch=self.epoch)
        with contextlib.suppress(grpc.RpcError):  # a store that does not hear it sees the end of the socket or of the heartbeat
            self.stub.CloseSession(request, timeout=_CLOSE_TIMEOUT_S, metadata=self.metadata)
        self.abandon()

    def abandon(self) -> None:
        """Ends the session without a word to a store that has failed it: the end of the socket gives everything back."""
        self._closing.set()
        if self.attachment is not None:
            self.attachment.close()
        self._heartbeat.cancel()
        self._thread.join()

    def _beats(self) -> Iterator[pb.KeepSessionRequest]:
        while not self._closing.is_set():
            yield pb.KeepSessionRequest(session_id=self.session_id, epoch=self.epoch)
            self._closing.wait(self._heartbeat_s)

    def _listen(self) -> None:
        """The heartbeat thread: until the session is closed, fenced or out of reach."""
        try:
            for answer in self._heartbeat:
                if answer.fenced:
                    break
        except grpc.RpcError as error:
            log.debug("heartbeat ended: %s", error)
        self.has_ended.set()
        if self.attachment is not None:
            self.attachment.unmap()  # the owner may not call for a long time, and would hold a dead store's memory until then


def _attach(opened: pb.OpenSessionResponse, timeout_s: float, user: SlabUser | None) -> Attachment:
    offer = opened.shm
    if offer.abi != SHM_ABI:
        raise NoSharedMemory(f"the store has shared-memory ABI {offer.abi}, this client {SHM_ABI}")
    return Attachment.open(
        offer.socket_path,
        HandoverRequest(opened.session_id, offer.ticket),
        [SlabOffer(slab.slab_id, slab.size_bytes, slab.nonce) for slab in offer.slabs],
        epoch=opened.epoch,
        timeout_s=timeout_s,
        user=user,
    )
