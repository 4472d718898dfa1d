"""A block store in a dictionary, which lends memory of this process."""

import threading
from collections.abc import Sequence

from common.ids import BlockKey
from common.patience import Patience
from common.shm.checksum import checksum
from executor_svc.clients.kvstore import LoadReport, SaveReport
from executor_svc.core.host_block import BlockSink, BlockSource, HostBlock
from tests.unit.executor_svc.filled import filled


class MemoryStore:
    """Holds every call until `gate` is set.

    Attributes:
        blocks: bytes by key.
        calls: names, in order.
        started: set by the first call.
        bug: what calls fail with.
    """

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, bytes] = {}
        self.calls: list[str] = []
        self.started = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.bug: Exception | None = None

    @property
    def transport(self) -> tuple[str, str]:
        return "shm", ""

    def look_after(self) -> None:
        pass

    def save(self, keys: Sequence[BlockKey], source: BlockSource) -> SaveReport:
        self._begin("save")
        lent = [bytearray(source.block_bytes) for _ in keys]
        sums = source.write_to([HostBlock(index, memoryview(memory)) for index, memory in enumerate(lent)])
        for key, memory, written in zip(keys, lent, sums, strict=True):
            self.blocks[key] = bytes(memory)
            assert checksum(self.blocks[key]) == written
        return SaveReport(num_written=len(keys))

    def load(self, keys: Sequence[BlockKey], sink: BlockSink, patience: Patience) -> LoadReport:
        self._begin("load")
        found: list[HostBlock] = []
        for index, key in enumerate(keys):
            if key not in self.blocks:
                break
            found.append(HostBlock(index, memoryview(self.blocks[key]), checksum(self.blocks[key])))
        num_loaded = sum(filled(sink, found))
        return LoadReport(num_loaded, {"shm": num_loaded}, "" if num_loaded == len(keys) else "not there", 0.0)

    def _begin(self, name: str) -> None:
        self.calls.append(name)
        self.started.set()
        self.gate.wait(10)
        if self.bug is not None:
            raise self.bug
