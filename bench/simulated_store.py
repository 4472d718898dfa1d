"""A block store in virtual time, and executors that load from it and save to it at given speeds. Bytes are counted, not moved."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from common.ids import BlockKey
from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc.simulation.device import SimulatedExecutor, SimulatedLink
from scheduler_svc.simulation.profile import DeviceProfile
from scheduler_svc.simulation.virtual_time import VirtualTimeLoop

LOAD_BYTES_PER_S = 28.7e9
SAVE_BYTES_PER_S = 3.0e9
"""Both as measured once on an H200, through all of the executor and the store."""
_LOOKUP_S = 0.0005
_FIRST_BLOCK_S = 0.001
_BYTES_PER_TOKEN = 32 * 2 * 8 * 128 * 2
"""Of Llama-8B in bf16."""
_TIER = "shm"


class SimulatedStore:
    """Holds whatever was saved, in shared memory; a BlockStore.

    Attributes:
        keys: of its blocks.
        num_loaded: blocks that went to executors.
    """

    connected = True
    reason = ""

    def __init__(self, lookup_s: float = _LOOKUP_S) -> None:
        self._lookup_s = lookup_s
        self.keys: set[BlockKey] = set()
        self.num_loaded = 0

    def num_present(self, keys: Sequence[BlockKey]) -> int:
        """Leading keys of a chain that it holds."""
        return next((number for number, key in enumerate(keys) if key not in self.keys), len(keys))

    async def lookup(self, keys: Sequence[BlockKey], timeout_s: float, wait_s: float) -> list[str]:
        """See BlockStore."""
        await asyncio.sleep(self._lookup_s)
        return [_TIER] * self.num_present(keys)

    async def prefetch(self, keys: Sequence[BlockKey], fingerprint: bytes, block_bytes: int) -> AsyncIterator[str]:
        """See BlockStore. All of it is up."""
        for _ in range(self.num_present(keys)):
            yield _TIER

    async def note_use(self, keys: Sequence[BlockKey]) -> None:
        """See BlockStore. Nothing is ever evicted."""


class StoringExecutor(SimulatedExecutor):
    """A SimulatedExecutor with a store beside it."""

    def __init__(
        self,
        profile: DeviceProfile,
        index: int,
        seed: int,
        store: SimulatedStore,
        *,
        load_bytes_per_s: float = LOAD_BYTES_PER_S,
        save_bytes_per_s: float = SAVE_BYTES_PER_S,
    ):
        super().__init__(profile, index, seed)
        self.load_bytes_per_s = load_bytes_per_s
        self.save_bytes_per_s = save_bytes_per_s
        self.store = store
        self._info.kv_transport = "simulated"
        self._info.block_bytes = _BYTES_PER_TOKEN * profile.block_size

    async def connect(self, hello: pb.Hello) -> "StoringLink":
        """See ExecutorConnector."""
        return StoringLink(self._info, self, self._profile)


class StoringLink(SimulatedLink):
    """A session with a StoringExecutor. Copies run beside the steps, one after another in each direction."""

    _executor: StoringExecutor
    _results: asyncio.Queue[Any]

    def __init__(self, info: pb.ExecutorInfo, executor: StoringExecutor, profile: DeviceProfile):
        super().__init__(info, executor, profile)
        self._loads_end_s = self._saves_end_s = 0.0

    def send(self, command: pb.RunSessionRequest) -> None:
        """See ExecutorLink."""
        now_s = asyncio.get_running_loop().time()
        if command.HasField("load_blocks"):
            load, store = command.load_blocks, self._executor.store
            num_loaded = store.num_present([BlockKey(key) for key in load.keys])
            seconds = _FIRST_BLOCK_S + num_loaded * self.info.block_bytes / self._executor.load_bytes_per_s
            self._loads_end_s = max(now_s, self._loads_end_s) + seconds
            store.num_loaded += num_loaded
            loaded = pb.BlocksLoaded(load_id=load.load_id, num_loaded=num_loaded, seconds=seconds)
            loaded.num_by_tier[_TIER] = num_loaded
            loaded.tiers.add(tier=_TIER, num_blocks=num_loaded, first_s=_FIRST_BLOCK_S, seconds=seconds)
            self._tell_at(self._loads_end_s, pb.RunSessionResponse(blocks_loaded=loaded))
        elif command.HasField("save_blocks"):
            save = command.save_blocks
            seconds = len(save.keys) * self.info.block_bytes / self._executor.save_bytes_per_s
            self._saves_end_s = max(now_s, self._saves_end_s) + seconds
            saved = pb.BlocksSaved(save_id=save.save_id, num_written=len(save.keys))
            self._tell_at(self._saves_end_s, pb.RunSessionResponse(blocks_saved=saved), list(save.keys))
        else:
            super().send(command)

    async def events(self) -> AsyncIterator[pb.RunSessionResponse]:
        """See ExecutorLink."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop), "time has to be virtual"
        while True:
            event = await self._results.get()
            if isinstance(event, pb.RunSessionResponse):
                yield event
                continue
            yield pb.RunSessionResponse(result=event)
            loop.spend(self._profile.host_step_s + self._profile.host_token_s * len(event.sampled))

    def _tell_at(self, at_s: float, event: pb.RunSessionResponse, saved_keys: Sequence[bytes] = ()) -> None:
        def tell() -> None:
            self._executor.store.keys.update(map(BlockKey, saved_keys))
            self._results.put_nowait(event)

        asyncio.get_running_loop().call_at(at_s, tell)
