"""Bytes through shared memory and inline are the same bytes, and wrong bytes are nobody's."""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from common.degraded import DegradedPaths
from common.errors import InvalidParameter, OctavoError
from common.ids import BlockKey
from common.patience import Patience
from common.rpc.channel import ChannelSecurity
from common.rpc.status import from_rpc_error
from common.shm.checksum import checksum
from executor_svc.clients.kvstore_session import SessionSpec, StoreSession, Transport
from executor_svc.core.host_block import HostBlock
from executor_svc.kvcache.copy_threads import CopyThreads
from executor_svc.kvcache.host_buffers import HostFilling
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from tests.integration.kvstore_svc.store_process import FINGERPRINT, MIB, StoreProcess, key, wait_until

TRANSPORTS: list[Transport] = ["shm", "inline"]
Block = tuple[BlockKey, memoryview]


def make_blocks(num_blocks: int, block_bytes: int, first: int = 0) -> list[Block]:
    return [(key(first + i), memoryview(os.urandom(block_bytes))) for i in range(num_blocks)]


def make_buffers(blocks: list[Block]) -> list[Block]:
    return [(key, memoryview(bytearray(data.nbytes))) for key, data in blocks]


def open_session(store: StoreProcess, transport: Transport = "shm", block_bytes: int = 4096) -> StoreSession:
    return StoreSession.open(store.channel, SessionSpec("raw", FINGERPRINT, block_bytes, transport, ChannelSecurity()), 10.0)


def flip_a_bit(store: StoreProcess, number: int, block_bytes: int = 4096) -> None:
    """In shared memory, as broken memory or a broken client would."""
    with closing(open_session(store, block_bytes=block_bytes)) as session:
        request = pb.AcquireBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=[key(number)])
        (response,) = session.stub.AcquireBlocks(request, timeout=5)
        handle = response.results[0].handle
        assert session.attachment is not None
        view = session.attachment.view(handle.slab_id, handle.offset_bytes, handle.length_bytes)
        assert view is not None
        view[-1] ^= 1
        del view


@pytest.mark.parametrize("block_bytes", [1, 4096, 4097, MIB, MIB + 1, 737_280])
@pytest.mark.parametrize("writer", TRANSPORTS)
def test_a_block_reads_the_same_over_both_transports(empty_store: StoreProcess, writer: Transport, block_bytes: int) -> None:
    blocks = make_blocks(2, block_bytes)
    with closing(empty_store.client(writer, block_bytes=block_bytes)) as client:
        assert client.save(blocks).num_written == 2
        assert client.transport[0] == writer

    for reader in TRANSPORTS:
        into = make_buffers(blocks)
        with closing(empty_store.client(reader, block_bytes=block_bytes)) as client:
            report = client.load(into, Patience(10.0))
        assert (report.num_loaded, report.num_by_tier, report.reason) == (2, {"shm": 2}, "")
        assert [bytes(data) for _, data in into] == [bytes(data) for _, data in blocks]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_loading_stops_at_the_first_block_that_is_not_there(empty_store: StoreProcess, transport: Transport) -> None:
    blocks = make_blocks(4, 4096)
    with closing(empty_store.client(transport)) as client:
        client.save([blocks[0], blocks[1], blocks[3]])

        report = client.load(make_buffers(blocks), Patience(5.0))

    assert (report.num_loaded, report.reason) == (2, "not in the store")
    wait_until(lambda: empty_store.stats().tiers[0].num_leased_blocks == 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_present_is_not_written_again(store: StoreProcess, transport: Transport) -> None:
    blocks = make_blocks(3, 4096)
    with closing(store.client(transport)) as client:
        client.save(blocks[:2])
        report = client.save(blocks)

    assert (report.num_written, report.num_present, report.num_failed) == (1, 2, 0)
    assert store.stats().tiers[0].num_writes == 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_flipped_bit_is_a_miss_and_is_counted(store: StoreProcess, transport: Transport) -> None:
    blocks = make_blocks(3, 4096)
    degraded = DegradedPaths()
    with closing(store.client(transport, degraded=degraded)) as client:
        client.save(blocks)
        flip_a_bit(store, 1)

        report = client.load(make_buffers(blocks), Patience(5.0))

        assert report.num_loaded == 1
        wait_until(lambda: store.stats().tiers[0].num_leased_blocks == 0)
        stats = store.stats()
        assert (stats.num_checksum_mismatches, stats.tiers[0].num_blocks) == (1, 2)
        assert client.save(blocks).num_written == 1
        into = make_buffers(blocks)
        assert client.load(into, Patience(5.0)).num_loaded == 3
        assert [bytes(data) for _, data in into] == [bytes(data) for _, data in blocks]
    assert degraded.counts["kvstore_corrupt"] == (1 if transport == "shm" else 0)


def test_a_wrong_suspicion_drops_nothing(store: StoreProcess) -> None:
    """The store looks at its own bytes: a client with broken memory cannot empty it."""
    with closing(store.client("shm")) as client, closing(open_session(store)) as session:
        client.save(make_blocks(1, 4096))
        request = pb.AcquireBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=[key(0)])
        (response,) = session.stub.AcquireBlocks(request, timeout=5)
        lease_id = response.results[0].handle.lease_id

        session.stub.ReleaseBlocks(
            pb.ReleaseBlocksRequest(
                session_id=session.session_id, epoch=session.epoch, lease_ids=[lease_id], suspect_lease_ids=[lease_id]
            )
        )

    assert store.stats().tiers[0].num_blocks == 1
    assert store.stats().num_checksum_mismatches == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_that_are_not_what_their_commit_says_are_nobodys(empty_store: StoreProcess, transport: Transport) -> None:
    """The store does not read what a writer has just hashed; the first reader finds out, and the block is gone."""
    num_before = empty_store.stats().num_checksum_mismatches
    with closing(open_session(empty_store)) as session:
        reserved = session.stub.ReserveBlocks(
            pb.ReserveBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=[key(1)])
        )
        handle = reserved.results[0].handle
        commit = pb.Commit(lease_id=handle.lease_id, generation=handle.generation, checksum=checksum(b"other bytes"))
        committed = session.stub.CommitBlocks(
            pb.CommitBlocksRequest(session_id=session.session_id, epoch=session.epoch, commits=[commit, commit])
        )
    assert list(committed.statuses) == [pb.BLOCK_STATUS_OK, pb.BLOCK_STATUS_REJECTED]  # a lease commits once
    with closing(empty_store.client(transport)) as client:
        assert client.load(make_buffers(make_blocks(1, 4096, first=1)), Patience(5.0)).num_loaded == 0
        wait_until(lambda: empty_store.stats().tiers[0].used_bytes == 0)  # before the session ends, and its suspicion with it
    assert empty_store.stats().num_checksum_mismatches == num_before + 1


def test_a_commit_for_another_place_is_rejected(empty_store: StoreProcess) -> None:
    with closing(open_session(empty_store)) as session:
        reserved = session.stub.ReserveBlocks(
            pb.ReserveBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=[key(1)])
        )
        handle = reserved.results[0].handle
        commit = pb.Commit(lease_id=handle.lease_id, generation=handle.generation + 1, checksum=checksum(bytes(4096)))
        committed = session.stub.CommitBlocks(
            pb.CommitBlocksRequest(session_id=session.session_id, epoch=session.epoch, commits=[commit])
        )
    assert list(committed.statuses) == [pb.BLOCK_STATUS_REJECTED]
    assert empty_store.stats().tiers[0].used_bytes == 0


def test_a_save_of_several_calls_is_one_save(tmp_path: Path) -> None:
    """More than is reserved and committed together."""
    block_bytes = 8 * MIB
    flags = ("--capacity-bytes", str(128 * MIB), "--slab-bytes", str(128 * MIB))
    blocks = [(key(n), memoryview(bytes([n]) * block_bytes)) for n in range(11)]
    with closing(StoreProcess(tmp_path, *flags)) as store, closing(store.client("shm", block_bytes=block_bytes)) as client:
        assert client.save([blocks[9]]).num_written == 1

        report = client.save(blocks)

        assert (report.num_written, report.num_present, report.num_failed) == (10, 1, 0)
        into = make_buffers(blocks)
        assert client.load(into, Patience(10.0)).num_loaded == 11
        assert all(data == expected for (_, data), (_, expected) in zip(into, blocks, strict=True))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_store_evicts_the_oldest_to_make_room(empty_store: StoreProcess, transport: Transport) -> None:
    blocks = make_blocks(6, MIB // 2 + 1)
    with closing(empty_store.client(transport, block_bytes=MIB // 2 + 1)) as client:
        for block in blocks:
            assert client.save([block]).num_written == 1
        for block in make_blocks(4, MIB // 2 + 1, first=100):
            assert client.save([block]).num_written == 1
        assert client.load(make_buffers(blocks[:1]), Patience(5.0)).num_loaded == 0
        assert client.load(make_buffers(blocks[-1:]), Patience(5.0)).num_loaded == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_store_full_of_held_blocks_refuses_writes_and_goes_on_serving(empty_store: StoreProcess, transport: Transport) -> None:
    blocks = make_blocks(3, MIB)
    degraded = DegradedPaths()
    with closing(open_session(empty_store, block_bytes=MIB)) as holder, closing(
        empty_store.client(transport, block_bytes=MIB, degraded=degraded)
    ) as client:  # fmt: skip
        assert client.save(blocks).num_written == 3
        request = pb.AcquireBlocksRequest(session_id=holder.session_id, epoch=holder.epoch, keys=[key for key, _ in blocks])
        list(holder.stub.AcquireBlocks(request, timeout=5))

        report = client.save(make_blocks(1, MIB, first=10))

        assert (report.num_failed, report.reason) == (1, "STORE_FULL")
        assert degraded.counts["kvstore_full"] == 1
        into = make_buffers(blocks)
        assert client.load(into, Patience(5.0)).num_loaded == 3
        assert [bytes(data) for _, data in into] == [bytes(data) for _, data in blocks]
        holder.close()
        wait_until(lambda: client.save(make_blocks(1, MIB, first=10)).num_failed == 0)


def test_a_stalled_store_costs_a_client_its_timeout_and_no_more(store: StoreProcess) -> None:
    blocks = make_blocks(1, 4096)
    with closing(store.client("shm")) as client:
        client.save(blocks)
        store.process.send_signal(signal.SIGSTOP)

        report = client.load(make_buffers(blocks), Patience(0.2))

        assert report.num_loaded == 0
        assert report.reason
        store.process.send_signal(signal.SIGCONT)
        wait_until(lambda: client.load(make_buffers(blocks), Patience(5.0)).num_loaded == 1)
        assert client.transport == ("shm", "")


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([{"key": b"short", "block_bytes": 4096, "checksum": b"c" * 16}], "key: has 5 bytes, must have 32"),
        (
            [{"key": b"k" * 32, "block_bytes": 4095, "checksum": b"c" * 16}],
            "block_bytes: is 4095, the session's blocks have 4096",
        ),
        ([{"key": b"k" * 32, "block_bytes": 4096, "checksum": b"c"}], "checksum: has 1 bytes, must have 16"),
        ([{"key": b"k" * 32, "block_bytes": 4096, "checksum": b"c" * 16, "data": b"x" * 4097}], "data: 1 bytes more"),
        ([{"key": b"k" * 32, "block_bytes": 4096, "checksum": b"c" * 16, "data": b"x"}], "data: the last block lacks 4095 bytes"),
        ([{"data": b"x"}], "data: 1 bytes more"),
        (
            [{"key": b"k" * 32, "block_bytes": 4096, "checksum": b"c" * 16}, {"key": b"l" * 32}],
            "data: the block before lacks 4096 bytes",
        ),
    ],
)
def test_chunks_that_are_no_blocks_are_refused_and_leave_nothing(
    empty_store: StoreProcess, chunks: list[dict[str, object]], message: str
) -> None:
    with closing(open_session(empty_store, "inline")) as session:
        requests = [
            pb.PutBlocksRequest(session_id=session.session_id, epoch=session.epoch, **chunk)  # type: ignore[arg-type]
            for chunk in chunks
        ]
        error = error_of(lambda: session.stub.PutBlocks(iter(requests), timeout=5))
        assert isinstance(error, InvalidParameter)
        assert error.message.startswith(message)
        assert empty_store.stats().tiers[0].used_bytes == 0


def test_a_block_larger_than_a_slab_is_refused_with_the_setting(empty_store: StoreProcess) -> None:
    with closing(empty_store.client("shm", block_bytes=64 * MIB)) as client:
        report = client.save(make_blocks(1, 64 * MIB))

    assert report.num_failed == 1
    assert "layout.block_bytes: is 67108864" in report.reason
    assert "--slab-bytes" in report.reason


def test_a_buffer_of_the_wrong_size_is_the_callers_bug(empty_store: StoreProcess) -> None:
    with closing(empty_store.client()) as client, pytest.raises(ValueError, match="4096 bytes"):
        client.save([(key(1), memoryview(bytes(4095)))])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_call_that_is_broken_off_holds_nothing(store: StoreProcess, transport: Transport) -> None:
    """An interrupt, for example, or a bug of the caller: the session goes on beating, so its leases must end here."""

    class BrokenOffError(Exception):
        pass

    class BrokenFilling(HostFilling):
        def add(self, blocks: Sequence[HostBlock]) -> None:
            raise BrokenOffError

    class BreaksOff:
        block_bytes = 4096

        def begin(self) -> HostFilling:
            return BrokenFilling([], CopyThreads().begin())

        def write_to(self, places: Sequence[HostBlock]) -> list[bytes]:
            raise BrokenOffError

    with closing(store.client(transport)) as client:
        client.save(make_blocks(3, 4096))
        for call in (
            lambda: client.client.save([key(1), key(7)], BreaksOff()),
            lambda: client.client.load([key(1), key(2)], BreaksOff(), Patience(5.0)),
        ):
            with pytest.raises(BrokenOffError):
                call()
            wait_until(lambda: store.stats().tiers[0].num_leased_blocks == 0)
        assert client.load(make_buffers(make_blocks(2, 4096)), Patience(5.0)).num_loaded == 2


def test_a_buffer_that_cannot_be_written_is_the_callers_bug(empty_store: StoreProcess) -> None:
    with closing(empty_store.client()) as client, pytest.raises(ValueError, match="read-only"):
        client.save(make_blocks(2, 4096))
        client.load([(key(1), memoryview(bytes(4096)))], Patience(1.0))


def error_of(call: Callable[[], object]) -> OctavoError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return from_rpc_error(caught.value)
