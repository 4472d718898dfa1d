"""A store that dies and comes back: clients lose blocks, never their nerve, and never read what is not theirs."""

import gc
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from common.degraded import DegradedPaths
from common.errors import StaleEpoch
from common.patience import Patience
from common.rpc.channel import ChannelSecurity
from common.rpc.status import from_rpc_error
from executor_svc.clients.kvstore_session import SessionSpec, StoreSession, Transport
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from tests.integration.kvstore_svc.store_process import FINGERPRINT, StoreProcess, key, wait_until


@pytest.mark.parametrize("transport", ["shm", "inline"])
def test_a_client_goes_on_with_the_next_store(store: StoreProcess, transport: Transport) -> None:
    blocks = [(key(i), memoryview(os.urandom(4096))) for i in range(3)]
    into = [(key(i), memoryview(bytearray(4096))) for i in range(3)]
    degraded = DegradedPaths()
    with closing(store.client(transport, degraded=degraded)) as client:
        assert client.save(blocks).num_written == 3
        store.kill()

        dead = client.save(blocks)
        assert (dead.num_failed, dead.num_written) == (3, 0)
        assert dead.reason
        assert client.load(into, Patience(1.0)).num_loaded == 0
        assert client.transport[0] == "none"
        assert degraded.counts["kvstore_unavailable"] > 0

        store.restart()
        wait_until(lambda: client.save(blocks).num_failed == 0)
        assert client.load(into, Patience(5.0)).num_loaded == 3
        assert [bytes(data) for _, data in into] == [bytes(data) for _, data in blocks]
        assert client.transport[0] == transport


def test_handles_and_sessions_of_the_store_before_are_worth_nothing(store: StoreProcess) -> None:
    session = StoreSession.open(store.channel, SessionSpec("raw", FINGERPRINT, 4096, "shm", ChannelSecurity()), 10.0)
    request = pb.ReserveBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=[key(1)])
    handle = session.stub.ReserveBlocks(request, timeout=5).results[0].handle
    assert session.attachment is not None
    view = session.attachment.view(handle.slab_id, handle.offset_bytes, handle.length_bytes)
    assert view is not None
    store.kill()
    store.restart()
    store.wait_ready()
    view[:] = b"x" * 4096  # the old memory is still there, and nobody else's

    commit = pb.Commit(lease_id=handle.lease_id, generation=handle.generation, checksum=b"c" * 16)
    calls: list[tuple[Any, Message]] = [
        (session.stub.CommitBlocks, pb.CommitBlocksRequest(session_id=session.session_id, epoch=session.epoch, commits=[commit])),
        (session.stub.ReserveBlocks, request),
        (session.stub.ReleaseBlocks, pb.ReleaseBlocksRequest(session_id=session.session_id, epoch=session.epoch)),
    ]
    for call, message in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call(message, timeout=10, wait_for_ready=True)
        assert isinstance(from_rpc_error(caught.value), StaleEpoch)
    assert session.has_ended.wait(10)
    del view
    session.abandon()
    assert store.stats().tiers[0].used_bytes == 0


def test_a_client_whose_session_was_dropped_opens_another_within_the_call(store: StoreProcess) -> None:
    """STALE_EPOCH costs no block: the call is done again in a new session."""
    with closing(store.client("shm")) as client, closing(store.client("shm")) as other:
        client.save([(key(1), memoryview(bytes(4096)))])
        session = client.client._session
        assert session is not None
        store.stub.CloseSession(pb.CloseSessionRequest(session_id=session.session_id, epoch=session.epoch), timeout=5)

        assert client.save([(key(2), memoryview(bytes(4096)))]).num_written == 1
        assert other.load([(key(2), memoryview(bytearray(4096)))], Patience(5.0)).num_loaded == 1


def num_mapped_slabs() -> int:
    return Path("/proc/self/maps").read_text().count("octavo-slab")


def test_an_idle_client_lets_go_of_a_dead_stores_memory(store: StoreProcess) -> None:
    """Or the next store would find the machine half full."""
    gc.collect()  # slabs of stores that ran in this process
    num_before = num_mapped_slabs()
    with closing(store.client("shm")) as client:
        client.save([(key(1), memoryview(bytes(4096)))])
        assert num_mapped_slabs() > num_before

        store.kill()

        wait_until(lambda: num_mapped_slabs() <= num_before)


def test_a_store_that_was_never_there_is_reported_and_left_alone_for_a_while(store: StoreProcess) -> None:
    store.stop()
    degraded = DegradedPaths()
    with closing(store.client(degraded=degraded)) as client:
        reports = [client.load([(key(1), memoryview(bytearray(4096)))], Patience(0.5)) for _ in range(50)]

    assert {report.num_loaded for report in reports} == {0}
    assert all(report.reason for report in reports)
    assert degraded.counts["kvstore_unavailable"] < 50
