"""A block store in a process of its own, and clients of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.degraded import DegradedPaths
from common.ids import BlockKey
from common.patience import Patience
from common.rpc.address import Address
from common.rpc.channel import sync_channel
from executor_svc.clients.kvstore import BlockStoreClient, LoadReport, SaveReport
from executor_svc.clients.kvstore_session import Transport
from executor_svc.kvcache.copy_threads import CopyThreads
from executor_svc.kvcache.host_buffers import HostBuffers
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from octavo.kvstore.v1 import kv_store_service_pb2_grpc as pb_grpc

MIB = 1 << 20
Block = tuple[BlockKey, memoryview]
FINGERPRINT = b"f" * 32
TIMEOUT_S = 20.0
_PATIENCE_S = 120.0
"""Of wait_until: nobody fails because a machine is busy. What never comes true is found out later, that is all."""


class BufferClient:
    """A client as the executor has it, whose blocks are buffers of this process.

    Attributes:
        client: what it does.
    """

    def __init__(self, client: BlockStoreClient, block_bytes: int):
        self.client = client
        self._block_bytes = block_bytes
        self._copy_threads = CopyThreads()

    @property
    def transport(self) -> tuple[str, str]:
        """See BlockStoreClient."""
        return self.client.transport

    def connect(self, timeout_s: float) -> None:
        """See BlockStoreClient."""
        self.client.connect(timeout_s)

    def look_after(self) -> None:
        """See BlockStoreClient."""
        self.client.look_after()

    def save(self, blocks: Sequence[Block]) -> SaveReport:
        """Stores the bytes of each block under its key."""
        return self.client.save(*self._divided(blocks))

    def load(self, blocks: Sequence[Block], patience: Patience) -> LoadReport:
        """Fills each buffer with the block of its key, a chain that stops at the first miss."""
        keys, buffers = self._divided(blocks)
        return self.client.load(keys, buffers, patience)

    def close(self) -> None:
        """See BlockStoreClient."""
        self.client.close()

    def _divided(self, blocks: Sequence[Block]) -> tuple[list[BlockKey], HostBuffers]:
        return [key for key, _ in blocks], HostBuffers([data for _, data in blocks], self._block_bytes, self._copy_threads)


class StoreProcess:
    """python -m kvstore_svc.

    Attributes:
        address: where it listens.
        shm_socket: its descriptor socket.
        disk_dir: folder of its disk tier, which it has if it is given a capacity.
    """

    def __init__(self, folder: Path, *flags: str):
        self.address = Address(f"unix:{folder}/kv.sock")
        self.shm_socket = folder / "kv.shm"
        self.disk_dir = folder / "disk"
        self._folder = folder
        self._flags = flags
        self._num_starts = 0
        self.process = self._spawn()
        self.wait_ready()
        # Not before: a channel whose first attempt fails waits a second for the next.
        self.channel = sync_channel(self.address)
        self.stub = pb_grpc.KvStoreServiceStub(self.channel)

    def _spawn(self) -> "subprocess.Popen[bytes]":
        self._num_starts += 1
        command = [sys.executable, "-m", "kvstore_svc", "--listen", self.address.target, "--shm-socket", str(self.shm_socket)]
        defaults = ["--capacity-bytes", str(4 * MIB), "--session-ttl-s", "30", "--grace-s", "2"]
        defaults += ["--disk-dir", str(self.disk_dir), "--disk-capacity-bytes", "0", "--disk-segment-bytes", str(MIB)]
        with (self._folder / "store.log").open("ab") as log:
            return subprocess.Popen([*command, *defaults, *self._flags], stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def wait_ready(self) -> None:
        """Returns when it listens."""
        wait_until(lambda: self.log.count("listening on") == self._num_starts or self.process.poll() is not None)
        assert self.process.poll() is None, self.log

    @property
    def log(self) -> str:
        """What it wrote."""
        return (self._folder / "store.log").read_text()

    def stats(self) -> pb.GetStatsResponse:
        """Its counters."""
        return self.stub.GetStats(pb.GetStatsRequest(), timeout=TIMEOUT_S)

    def client(
        self, transport: Transport = "auto", *, block_bytes: int = 4096, degraded: DegradedPaths | None = None
    ) -> BufferClient:
        """A client as the executor has it."""
        client = BlockStoreClient(
            self.address,
            client_id=f"test-{transport}",
            layout_fingerprint=FINGERPRINT,
            block_bytes=block_bytes,
            transport=transport,
            degraded=degraded or DegradedPaths(),
        )
        return BufferClient(client, block_bytes)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def restart(self) -> None:
        """A new process at the same addresses; the one before must be dead."""
        self.process = self._spawn()

    def reconnect(self) -> None:
        """A new channel: one that has lost its server waits before it tries again."""
        self.channel.close()
        self.channel = sync_channel(self.address)
        self.stub = pb_grpc.KvStoreServiceStub(self.channel)

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        return self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        """Ends everything."""
        self.channel.close()
        self.stop()


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns as soon as condition holds."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def key(number: int) -> BlockKey:
    """Key of a block of tests."""
    return BlockKey(number.to_bytes(32, "big"))
