"""Blocks between one executor's device and the block store, in one session: looked up, loaded, saved.

Knows the core's transfers and the store's look-up; never waits in the path of a step. What the store does not give is computed.
"""

import asyncio

from common.degraded import DegradedPaths
from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc import convert
from scheduler_svc.clients.block_store import BlockStore
from scheduler_svc.core.load_policy import LoadPolicy
from scheduler_svc.core.request import Request
from scheduler_svc.core.save_policy import BLOCKS_PER_SAVE, SaveLimits, SavePolicy
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.device_hits import DeviceHits
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.generation import Generation

_MAX_SAVES = 2
_MIN_PREFILL_TOKENS = 32


class BlockTraffic:
    """See the module's first lines.

    Attributes:
        num_arriving_tokens: prompt tokens of requests that are being looked up, and so are in no queue yet.
        no_save_runs: set while no save is under way.
    """

    def __init__(
        self, scheduler: Scheduler, info: pb.ExecutorInfo, config: EngineConfig, store: BlockStore, degraded: DegradedPaths
    ):
        self.num_arriving_tokens = 0
        self._scheduler = scheduler
        self._info = info
        self._config = config
        self._store = store
        self._degraded = degraded
        self._policy = LoadPolicy(info.block_bytes, info.block_size)
        self._device_hits = DeviceHits(store)
        self._num_saves = 0
        self.no_save_runs = asyncio.Event()
        self.no_save_runs.set()
        self._saves = SavePolicy(SaveLimits.of(info.num_blocks, copies_compete=info.backend == "cpu"))

    async def look_up(self, generation: Generation) -> int:
        """How many of the prompt's leading blocks are on the device or in the store; 0 when the store was not asked."""
        if not self._info.kv_transport or not self._config.prefix_caching:
            return 0
        request, block_size = generation.request, self._info.block_size
        keys = generation.prompt_keys(block_size)
        num_device_blocks = self._scheduler.num_device_tokens(request.root_key, keys) // block_size
        self._device_hits.note(keys[:num_device_blocks])
        missing = keys[num_device_blocks : _num_loadable_blocks(request, block_size)]
        if not missing:
            return 0
        self.num_arriving_tokens += len(request.prompt_token_ids)
        try:
            tiers = await self._store.lookup(missing, self._config.store_lookup_timeout_s)
        finally:
            self.num_arriving_tokens -= len(request.prompt_token_ids)
        return num_device_blocks + len(tiers)

    def begin_load(self, request: Request, num_found_blocks: int) -> pb.RunSessionRequest | None:
        """The command that brings up what look_up found, if that is worth it; the request waits for it."""
        # The device may have got more of the prefix during the look-up.
        num_missing_blocks = len(self._scheduler.missing_keys(request.request_id))
        num_device_blocks = _num_loadable_blocks(request, self._info.block_size) - num_missing_blocks
        num_blocks = max(0, num_found_blocks - num_device_blocks)
        if not self._policy.should_load(num_blocks):
            return None
        plan = self._scheduler.begin_load(request.request_id, num_blocks)
        return None if plan is None else convert.load_command(plan, self._config.store_load_timeout_s)

    def end_load(self, loaded: pb.BlocksLoaded) -> None:
        """A load ended, complete or not."""
        if loaded.reason:
            self._degraded.note("store_load_incomplete", loaded.reason)
        else:
            self._degraded.clear("store_load_incomplete")
        self._policy.note_load(loaded.num_loaded, loaded.seconds)
        self._scheduler.end_load(loaded.load_id, loaded.num_loaded, dict(loaded.num_by_tier))

    def next_save(self, num_outstanding_steps: int, now_s: float) -> pb.RunSessionRequest | None:
        """The command that writes new full blocks to the store, if it is time for that."""
        num_unsaved = self._scheduler.num_unsaved_blocks
        if self._num_saves >= _MAX_SAVES or not self._saves.should_save(num_unsaved, num_outstanding_steps, now_s):
            return None
        plan = self._scheduler.take_saves(BLOCKS_PER_SAVE)
        if plan is None:
            return None
        self._num_saves += 1
        self.no_save_runs.clear()
        return convert.save_command(plan)

    @property
    def save_due_s(self) -> float | None:
        """When next_save is to be asked again, whatever else happens; None: when something else happens."""
        return self._saves.due_s

    def end_save(self, saved: pb.BlocksSaved) -> None:
        """A save ended."""
        if saved.num_failed:
            self._degraded.note("store_save_failed", saved.reason)
        else:
            self._degraded.clear("store_save_failed")
        self._num_saves -= 1
        if self._num_saves == 0:
            self.no_save_runs.set()
        self._scheduler.end_save(saved.save_id)

    def note_step(self, num_prefill_tokens: int, forward_s: float) -> None:
        """A step ended; those that were mostly prefill say how fast computing is."""
        if num_prefill_tokens >= _MIN_PREFILL_TOKENS:
            self._policy.note_prefill(num_prefill_tokens, forward_s)


def _num_loadable_blocks(request: Request, block_size: int) -> int:
    """At least the prompt's last token has to be computed."""
    return (len(request.prompt_token_ids) - 1) // block_size
