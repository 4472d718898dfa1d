"""A client in a process of its own, to be killed: python -m tests.integration.kvstore_svc.client_process ADDRESS PHASE.

Says on standard output where it is, and goes on with each line on standard input.
"""

import itertools
import sys
from collections.abc import Iterator

import grpc

from common.rpc.address import Address
from common.rpc.channel import ChannelSecurity, sync_channel
from common.rpc.status import from_rpc_error
from common.shm.checksum import checksum
from executor_svc.clients.kvstore_session import SessionSpec, StoreSession, Transport
from octavo.kvstore.v1 import kv_store_service_pb2 as pb

BLOCK_BYTES = 4096
WORD = b"late"


def say(text: str) -> None:
    print(text, flush=True)


def reserve(session: StoreSession, number: int) -> pb.BlockHandle:
    request = pb.ReserveBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=[number.to_bytes(32, "big")])
    return session.stub.ReserveBlocks(request, timeout=5).results[0].handle


def mapped(session: StoreSession, handle: pb.BlockHandle) -> memoryview:
    assert session.attachment is not None
    view = session.attachment.view(handle.slab_id, handle.offset_bytes, handle.length_bytes)
    assert view is not None
    return view


def write(session: StoreSession, handle: pb.BlockHandle) -> memoryview:
    view = mapped(session, handle)
    view[:] = WORD * (BLOCK_BYTES // len(WORD))
    return view


def commit(session: StoreSession, handle: pb.BlockHandle, view: memoryview) -> None:
    done = pb.Commit(lease_id=handle.lease_id, generation=handle.generation, checksum=checksum(view))
    session.stub.CommitBlocks(
        pb.CommitBlocksRequest(session_id=session.session_id, epoch=session.epoch, commits=[done]), timeout=5
    )


def half_a_block(session: StoreSession) -> Iterator[pb.PutBlocksRequest]:
    yield pb.PutBlocksRequest(
        session_id=session.session_id, epoch=session.epoch, key=b"k" * 32, block_bytes=BLOCK_BYTES, checksum=b"c" * 16, data=b"x"
    )
    say("ready")
    sys.stdin.readline()


def main() -> None:
    address, phase = sys.argv[1:]
    transport: Transport = "inline" if phase == "putting" else "shm"
    spec = SessionSpec("victim", b"f" * 32, BLOCK_BYTES, transport, ChannelSecurity())
    session = StoreSession.open(sync_channel(Address(address)), spec, 10.0)
    match phase:
        case "reserving":
            say("ready")
            for number in itertools.count(1000):
                reserve(session, number)
        case "reserved":
            for number in range(1, 11):
                reserve(session, number)
            say("ready")
        case "writing":
            handle = reserve(session, 1)
            say("ready")
            while True:
                write(session, handle)
        case "reading":
            handle = reserve(session, 1)
            commit(session, handle, write(session, handle))
            request = pb.AcquireBlocksRequest(session_id=session.session_id, epoch=session.epoch, keys=[(1).to_bytes(32, "big")])
            list(session.stub.AcquireBlocks(request, timeout=5))
            say("ready")
        case "putting":
            session.stub.PutBlocks(half_a_block(session))
        case "sleeping":
            handle = reserve(session, 1)
            view = mapped(session, handle)  # before it sleeps: its heartbeat may learn of the fence before it goes on here
            say("ready")
            sys.stdin.readline()
            view[:] = WORD * (BLOCK_BYTES // len(WORD))
            try:
                commit(session, handle, view)
                say("committed")
            except grpc.RpcError as error:
                say(from_rpc_error(error).reason)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
