"""Load on a block store that will be killed: a client that writes, reads and persists, and remembers what it was promised.

Knows keys, promises and one store process. Does not know when the store dies.
"""

import random
import threading
from contextlib import closing

import grpc

from common.ids import BlockKey
from common.patience import Patience
from octavo.kvstore.v1 import kv_store_admin_service_pb2 as admin_pb
from octavo.kvstore.v1 import kv_store_admin_service_pb2_grpc as admin_grpc
from octavo.kvstore.v1 import kv_store_service_pb2 as pb
from tests.integration.kvstore_svc.store_process import StoreProcess

BLOCK_BYTES = 32 << 10
_BATCH = 8
_TIMEOUT_S = 20.0


class Wrong(Exception):  # noqa: N818 -- says what it is
    """A block with bytes of another one was served."""


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def content(number: int) -> bytes:
    """The bytes that every block of this key has."""
    return number.to_bytes(8, "big") * (BLOCK_BYTES // 8)


class Promises:
    """What the store has said of blocks, over all its lives.

    Attributes:
        durable: must be there until dropped.
        written: may be there.
        dropped: must not be there unless written again.
    """

    def __init__(self) -> None:
        self.durable: set[int] = set()
        self.written: set[int] = set()
        self.dropped: set[int] = set()
        self.num_read = 0

    def forget(self) -> None:
        """The store has confirmed that it has dropped everything."""
        self.dropped |= self.written
        self.durable.clear()
        self.written.clear()


class Load(threading.Thread):
    """Runs until the store does not answer any more.

    Args:
        store: where.
        promises: what it was told; shared with nobody while the thread runs.
        first: number of its first new block.
        seed: of what it does.

    Attributes:
        has_begun: the store has taken the first block, or is dead.
        next_number: of the next new block.
        error: what should not have happened.
    """

    def __init__(self, store: StoreProcess, promises: Promises, first: int, seed: int):
        super().__init__(name="load", daemon=True)
        self.next_number = first
        self.has_begun = threading.Event()
        self.error: Exception | None = None
        self._store = store
        self._promises = promises
        self._random = random.Random(seed)

    def run(self) -> None:
        try:
            self._work()
        except grpc.RpcError:
            return  # it was killed
        except Exception as error:
            self.error = error
        finally:
            self.has_begun.set()

    def _work(self) -> None:
        admin = admin_grpc.KvStoreAdminServiceStub(self._store.channel)
        with closing(self._store.client("shm", block_bytes=BLOCK_BYTES)) as client:
            while True:
                numbers = range(self.next_number, self.next_number + _BATCH)
                self.next_number += _BATCH
                self._promises.written.update(numbers)
                if client.save([(key(n), memoryview(content(n))) for n in numbers]).num_failed:
                    return
                self.has_begun.set()
                keys = [key(n) for n in numbers]
                match self._random.randrange(4):
                    case 0:
                        self._store.stub.LookupBlocks(pb.LookupBlocksRequest(keys=keys), timeout=_TIMEOUT_S)
                    case 1 | 2:
                        answer = admin.PersistBlocks(admin_pb.PersistBlocksRequest(keys=keys), timeout=_TIMEOUT_S)
                        self._promises.durable.update(n for n, durable in zip(numbers, answer.durable, strict=True) if durable)
                    case _:
                        some = self._random.sample(sorted(self._promises.written), min(4, len(self._promises.written)))
                        read(self._store, some, self._promises)


def read(store: StoreProcess, numbers: list[int], promises: Promises) -> set[int]:
    """Reads blocks one by one; returns which are there.

    Raises:
        Wrong: bytes are not those of the key.
    """
    found = set()
    into = memoryview(bytearray(BLOCK_BYTES))
    with closing(store.client("shm", block_bytes=BLOCK_BYTES)) as client:
        for number in numbers:
            if client.load([(key(number), into)], Patience(_TIMEOUT_S)).num_loaded:
                promises.num_read += 1
                if into != content(number):
                    raise Wrong(f"block {number}")
                found.add(number)
    return found
