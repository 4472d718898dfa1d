"""Who gets the shared memory, and what becomes of a client that does not."""

import socket
import uuid
from collections.abc import Callable
from contextlib import closing

import pytest

from common.degraded import DegradedPaths
from common.errors import NoSharedMemory
from common.shm.attachment import Attachment, SlabOffer
from common.shm.handover import HandoverReply, HandoverRequest, HandoverStatus, fetch_descriptors
from common.shm.host import host_id
from common.shm.slab import SHM_ABI
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from tests.integration.kvstore_svc.store_process import FINGERPRINT, MIB, StoreProcess, key, wait_until


def open_session(store: StoreProcess, host: str = "", abi: int = SHM_ABI) -> pb.OpenSessionResponse:
    layout = pb.Layout(fingerprint=FINGERPRINT, block_bytes=4096)
    request = pb.OpenSessionRequest(
        client_id="raw", host_id=host or host_id(), layout=layout, transport=pb.TRANSPORT_AUTO, shm_abi=abi
    )
    return store.stub.OpenSession(request, timeout=5)


def attach(opened: pb.OpenSessionResponse, ticket: bytes = b"", nonce: int | None = None, epoch: int | None = None) -> Attachment:
    offers = [SlabOffer(s.slab_id, s.size_bytes, s.nonce if nonce is None else nonce) for s in opened.shm.slabs]
    request = HandoverRequest(opened.session_id, ticket or opened.shm.ticket)
    wanted_epoch = opened.epoch if epoch is None else epoch
    return Attachment.open(opened.shm.socket_path, request, offers, epoch=wanted_epoch, timeout_s=5)


def ask(store: StoreProcess, data: bytes) -> HandoverReply | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10)
        connection.connect(str(store.shm_socket))
        connection.send(data)
        answer, fds, _, _ = socket.recv_fds(connection, 100, 10)
        assert fds == []
        return HandoverReply.unpack(answer)


def test_a_ticket_is_good_once(empty_store: StoreProcess) -> None:
    opened = open_session(empty_store)
    with closing(attach(opened)), pytest.raises(NoSharedMemory, match="BAD_TICKET"):
        attach(opened)


def test_a_wrong_ticket_gets_nothing_and_spoils_the_right_one(empty_store: StoreProcess) -> None:
    """One attempt per session: tickets cannot be guessed at leisure."""
    opened = open_session(empty_store)

    with pytest.raises(NoSharedMemory, match="BAD_TICKET"):
        attach(opened, ticket=b"x" * 32)
    with pytest.raises(NoSharedMemory, match="BAD_TICKET"):
        attach(opened)


def test_a_ticket_of_another_session_gets_nothing(empty_store: StoreProcess) -> None:
    first, second = open_session(empty_store), open_session(empty_store)

    with pytest.raises(NoSharedMemory, match="BAD_TICKET"):
        attach(first, ticket=second.shm.ticket)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"x", HandoverStatus.BAD_REQUEST),
        (b"x" * 76, HandoverStatus.BAD_REQUEST),
        (b"x" * 1000, HandoverStatus.BAD_REQUEST),
        (HandoverRequest(str(uuid.uuid4()), b"t" * 32, abi=2).pack(), HandoverStatus.WRONG_ABI),
        (HandoverRequest(str(uuid.uuid4()), b"t" * 32).pack(), HandoverStatus.BAD_TICKET),
        (HandoverRequest(str(uuid.uuid4()), b"").pack(), HandoverStatus.BAD_TICKET),
    ],
    ids=["a byte", "too short", "too long", "another abi", "another ticket", "no ticket"],
)
def test_what_is_no_request_is_answered_and_harms_nobody(empty_store: StoreProcess, data: bytes, status: HandoverStatus) -> None:
    reply = ask(empty_store, data)

    assert reply is not None
    assert (reply.status, reply.num_fds) == (status, 0)
    attach(open_session(empty_store)).close()


def test_a_connection_that_ends_without_a_request_harms_nobody(empty_store: StoreProcess) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(empty_store.shm_socket))

    attach(open_session(empty_store)).close()


def test_another_user_gets_nothing(start_store: Callable[..., StoreProcess]) -> None:
    store = start_store("--allowed-uids", "54321")
    degraded = DegradedPaths()

    with pytest.raises(NoSharedMemory, match="FORBIDDEN_USER"):
        attach(open_session(store))
    with closing(store.client("auto", degraded=degraded)) as client:
        assert client.save([(key(1), memoryview(bytes(4096)))]).num_written == 1
        mode, reason = client.transport
        assert mode == "inline"
        assert "FORBIDDEN_USER" in reason
    assert degraded.counts["kvstore_inline"] == 1
    assert "transport inline" in store.log


def test_without_the_socket_auto_goes_inline_and_shm_does_not(store: StoreProcess) -> None:
    store.shm_socket.unlink()
    block = (key(1), memoryview(bytes(4096)))

    with closing(store.client("auto")) as client:
        assert client.save([block]).num_written == 1
        assert client.transport[0] == "inline"
        assert "No such file" in client.transport[1]
    with closing(store.client("shm")) as client:
        report = client.save([block])
        assert report.num_failed == 1
        assert "No such file" in report.reason
        assert client.transport[0] == "none"


def test_another_host_and_another_abi_are_told_to_go_inline(empty_store: StoreProcess) -> None:
    for opened, reason in (
        (open_session(empty_store, host="elsewhere"), "another host"),
        (open_session(empty_store, abi=99), "ABI 99"),
    ):
        assert not opened.HasField("shm")
        assert reason in opened.inline_reason


def test_memory_of_another_store_is_not_used(empty_store: StoreProcess) -> None:
    with pytest.raises(NoSharedMemory, match="belongs to another store"):
        attach(open_session(empty_store), nonce=1)
    with pytest.raises(NoSharedMemory, match="belongs to another store"):
        attach(open_session(empty_store), epoch=1)


def test_many_slabs_come_in_several_messages(start_store: Callable[..., StoreProcess]) -> None:
    store = start_store("--capacity-bytes", str(5 * MIB), "--slab-bytes", str(MIB // 16))
    opened = open_session(store)
    assert len(opened.shm.slabs) == 80

    handover = fetch_descriptors(
        opened.shm.socket_path, HandoverRequest(opened.session_id, opened.shm.ticket), num_slabs=80, timeout_s=5
    )
    assert len(set(handover.fds)) == 80
    handover.close_descriptors()
    handover.connection.close()
    wait_until(lambda: not store.stats().sessions)


def test_a_handle_outside_of_the_slabs_is_not_followed(empty_store: StoreProcess) -> None:
    with closing(attach(open_session(empty_store))) as attachment:
        size_bytes = 4 * MIB
        assert attachment.view(99, 8192, 4096) is None
        assert attachment.view(0, 0, 4096) is None, "the header is no data"
        assert attachment.view(0, size_bytes - 4096, 4097) is None
        assert attachment.view(0, size_bytes - 4096, 4096) is not None
