"""Blocks between one executor's device and the block store, in one session: looked up, loaded, saved.

Knows the core's transfers and the store's look-up; never waits in the path of a step. What the store does not give is computed.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.clock import Clock
from common.degraded import DegradedPaths
from common.ids import BlockKey, RequestId
from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc import convert
from scheduler_svc.clients.block_store import BlockStore
from scheduler_svc.core.load_policy import LoadPolicy, Prompt
from scheduler_svc.core.prefill_time import PrefillTime
from scheduler_svc.core.request import Request
from scheduler_svc.core.run_ahead import RunAhead
from scheduler_svc.core.save_policy import BLOCKS_PER_SAVE, SaveLimits, SavePolicy
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.device_hits import DeviceHits
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.generation import Generation
from scheduler_svc.prefetches import Found, Prefetches
from scheduler_svc.probes import Probes

log = logging.getLogger(__name__)
_MAX_SAVES = 2
_MIN_PREFILL_TOKENS = 32
_QUICK = 0.5


@dataclass(frozen=True, slots=True)
class _LoadUnderWay:
    """Blocks on their way to the device.

    Attributes:
        ends_at_s: as expected.
        is_quick: out of shared memory, in at most half the time that computing them would take.
    """

    tiers: Sequence[str]
    ends_at_s: float
    is_quick: bool


class BlockTraffic:
    """See the module's first lines.

    Attributes:
        num_arriving_tokens: prompt tokens of requests that are being looked up, and so are in no queue yet.
        no_save_runs: set while no save is under way.
        all_saved: set while besides no block waits to be saved.

    Args:
        run_ahead: of this executor: what is under way, and times of steps.
        on_ready: called when due_loads may have some.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        info: pb.ExecutorInfo,
        config: EngineConfig,
        store: BlockStore,
        degraded: DegradedPaths,
        clock: Clock,
        run_ahead: RunAhead,
        on_ready: Callable[[], None],
    ):
        self.num_arriving_tokens = 0
        self._scheduler = scheduler
        self._info = info
        self._block_bytes = info.stored_block_bytes or info.block_bytes
        self._config = config
        self._store = store
        self._degraded = degraded
        self._device_hits = DeviceHits(store)
        self._clock = clock
        self._run_ahead = run_ahead
        self._prefill = PrefillTime(run_ahead.step_times, scheduler.config.max_chunk_tokens)
        self._policy = LoadPolicy(info.block_size, self._prefill)
        self._probes = Probes(store, info.kv_fingerprint, self._block_bytes, self._policy, clock)
        self._prefetches = Prefetches(store, info.kv_fingerprint, self._block_bytes, on_ready)
        self._look_ups: set[asyncio.Task[None]] = set()
        self._loads: dict[int, _LoadUnderWay] = {}
        self._applied_step = 0
        self._commands: list[tuple[int, pb.RunSessionRequest]] = []  # of loads, and the step whose result each waits for
        self._num_saves = 0
        self.no_save_runs = asyncio.Event()
        self.no_save_runs.set()
        self.all_saved = asyncio.Event()
        self.all_saved.set()
        self._saves = SavePolicy(SaveLimits.of(info.num_blocks, copies_compete=info.backend == "cpu"))

    def close(self) -> None:
        """The session is over: nothing more will be heard of what is under way."""
        self.no_save_runs.set()
        self.all_saved.set()
        self._probes.close()
        self._prefetches.close()
        for task in self._look_ups:
            task.cancel()

    @property
    def is_loading(self) -> bool:
        """Whether blocks are on their way from the store: to the device, or up to shared memory for a request that waits."""
        return bool(self._loads) or self._prefetches.is_running

    async def look_up(self, generation: Generation) -> Found | None:
        """Where the prompt's leading blocks are; None: there was nothing to ask the store for, or it has nothing."""
        if not self._info.kv_transport or not self._config.prefix_caching:
            return None
        asked_at_s = self._clock.now()
        request, block_size = generation.request, self._info.block_size
        keys = generation.prompt_keys(block_size)
        num_device_blocks = self._scheduler.num_device_tokens(request.root_key, keys) // block_size
        self._device_hits.note(keys[:num_device_blocks])
        missing = keys[num_device_blocks : _num_loadable_blocks(request, block_size)]
        if not missing:
            return None
        self.num_arriving_tokens += len(request.prompt_token_ids)
        try:
            timeout_s = self._config.store_lookup_timeout_s
            end = len(request.prompt_token_ids)
            prompt = Prompt(num_device_blocks * block_size, end, (), queue_s=self._queue_s(asked_at_s))
            tiers = await self._store.lookup(missing, timeout_s, min(timeout_s, self._policy.lookup_wait_s(prompt)))
        finally:
            self.num_arriving_tokens -= len(request.prompt_token_ids)
        return Found(num_device_blocks, tiers, asked_at_s) if tiers else None

    def bring_back(self, request: Request) -> None:
        """A request may have been preempted: when it is its turn again, loading what the store has of it may be faster."""
        if self._info.kv_transport and (keys := self._scheduler.waiting_keys(request.request_id)):
            self._prefetches.drop(request.request_id)
            task = asyncio.create_task(self._look_up_again(request, keys))
            self._look_ups.add(task)
            task.add_done_callback(self._look_ups.discard)

    async def _look_up_again(self, request: Request, keys: Sequence[BlockKey]) -> None:
        """Of all its keys: those that the device still has may be gone when it is its turn."""
        timeout_s = self._config.store_lookup_timeout_s
        tiers = await self._store.lookup(keys, timeout_s, timeout_s)
        if tiers and self._scheduler.waiting_keys(request.request_id):
            self._prefetches.begin(request, Found(0, tiers, self._clock.now()), keys)

    def begin_load(self, request: Request, found: Found) -> bool:
        """Brings up what a look-up found, as far as that is worth it; the request waits for it. The command is one of due_loads.

        Returns:
            False: nothing is loaded.
        """
        is_next = self._scheduler.next_in_line == request.request_id
        if not is_next and self._scheduler.admitted_at_s(request.request_id) is not None:
            return False  # preempted: those ahead of it would take the blocks before it runs
        block_size, now_s = self._info.block_size, self._clock.now()
        keys = self._scheduler.missing_keys(request.request_id)
        # The device may have got more of the prefix during the look-up, or less.
        begin = len(self._scheduler.waiting_keys(request.request_id)) - len(keys)
        gone = ["shm"] * (found.num_device_blocks - begin)
        prompt = Prompt(
            begin=begin * block_size,
            end=max(len(request.prompt_token_ids), (begin + len(keys)) * block_size + 1),
            tiers=[*gone, *found.tiers[max(0, begin - found.num_device_blocks) :]][: len(keys)],
            spent_s=now_s - found.asked_at_s,
            queue_s=self._queue_s(now_s),
            transfers_s=self._transfers_s(now_s),
        )
        decision = self._policy.decide(prompt)
        log.debug("%s: %s; %s, expected of tiers: %s", request.request_id, prompt, decision, self._policy.speeds)
        if decision.declined_tier:
            first = prompt.tiers.index(decision.declined_tier, decision.num_blocks)
            self._probes.consider(decision.declined_tier, keys[first:])
        plan = self._scheduler.begin_load(request.request_id, decision.num_blocks) if decision.num_blocks else None
        if plan is None:
            if decision.num_blocks or not is_next:  # no room, or not its turn
                self._prefetches.begin(request, Found(begin, prompt.tiers, now_s), keys)
            return False
        self._prefetches.drop(request.request_id)
        tiers = prompt.tiers[: len(plan.keys)]
        load_s = sum(self._policy.speed(tier).seconds(tiers.count(tier)) for tier in set(tiers))
        compute_s = self._prefill.seconds(prompt.begin, prompt.begin + len(tiers) * block_size)
        is_quick = load_s <= _QUICK * compute_s and all(tier == "shm" for tier in tiers)
        self._loads[plan.load_id] = _LoadUnderWay(tiers, now_s + prompt.transfers_s + load_s, is_quick)
        patience = decision.patience.at_most(self._config.store_load_timeout_s, len(plan.keys))
        self._commands.append((plan.after_step, convert.load_command(plan, patience)))
        return True

    def _queue_s(self, now_s: float) -> float:
        """Until a request could run in any case: behind steps under way, prompts that were begun, and what is loaded quickly.

        The latter would have been computed before it, which takes longer. When many ask at once, whoever computed instead of
        waiting for them would hold up all of them. Slower loads do not count: nobody knows when they end.
        """
        loads_s = self._transfers_s(now_s) if all(load.is_quick for load in self._loads.values()) else 0.0
        begun_s = self._prefill.seconds(0, self._scheduler.num_prefill_tokens_ahead)
        return max(loads_s, begun_s, self._run_ahead.busy_s(now_s))

    def _transfers_s(self, now_s: float) -> float:
        """Until the loads under way are expected to end."""
        return max(0.0, max((load.ends_at_s for load in self._loads.values()), default=now_s) - now_s)

    def due_loads(self) -> list[pb.RunSessionRequest]:
        """Loads that were begun, also just now: for requests that waited, whose blocks came up meanwhile or whose turn it is."""
        has_begun = True
        while has_begun:  # behind one that is loaded for, the turn is another one's
            has_begun = False
            for request, found in self._prefetches.due(self._scheduler.next_in_line, self._clock.now()):
                if self.begin_load(request, found):
                    has_begun = True
                elif not self._scheduler.waiting_keys(request.request_id):
                    self._prefetches.drop(request.request_id)
        due = [command for after_step, command in self._commands if after_step <= self._applied_step]
        self._commands = [one for one in self._commands if one[0] > self._applied_step]
        return due

    def forget(self, request_id: RequestId) -> None:
        """A request has ended."""
        self._prefetches.drop(request_id)

    def end_load(self, loaded: pb.BlocksLoaded) -> None:
        """A load ended, complete or not."""
        if loaded.reason:
            self._degraded.note("store_load_incomplete", loaded.reason)
        else:
            self._degraded.clear("store_load_incomplete")
        log.debug("load %d: %d blocks in %.4f s %s", loaded.load_id, loaded.num_loaded, loaded.seconds, loaded.reason)
        load = self._loads.pop(loaded.load_id, None)
        if load is not None:
            for reading in loaded.tiers:
                tier = reading.tier or load.tiers[min(loaded.num_loaded, len(load.tiers) - 1)]
                self._policy.speed(tier).note(reading.num_blocks, reading.first_s, reading.seconds)
        self._scheduler.end_load(loaded.load_id, loaded.num_loaded, dict(loaded.num_by_tier))

    def next_save(self, num_outstanding_steps: int, now_s: float) -> pb.RunSessionRequest | None:
        """The command that writes new full blocks to the store, if it is time for that."""
        num_unsaved = self._scheduler.num_unsaved_blocks
        if num_unsaved == 0 and self._num_saves == 0:
            self.all_saved.set()
        else:
            self.all_saved.clear()
        if self._num_saves >= _MAX_SAVES or not self._saves.should_save(num_unsaved, num_outstanding_steps, now_s):
            return None
        plan = self._scheduler.take_saves(BLOCKS_PER_SAVE)
        if plan is None:
            return None
        self._num_saves += 1
        self.no_save_runs.clear()
        return convert.save_command(plan)

    def expect_blocks(self, num_blocks: float) -> None:
        """Probably not more than these blocks of the device will be taken in the next seconds."""
        self._saves.expect(num_blocks, self._scheduler.num_clean_blocks)

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

    def load_bytes_per_s(self, tier: str) -> float:
        """How fast blocks come from a tier lately; 0: not known."""
        block_s = self._policy.speed(tier).block_s
        return self._block_bytes / block_s if block_s else 0.0

    def note_step(self, step_id: int, num_prefill_tokens: int) -> None:
        """A step of the core's number ended, and its time was learned from."""
        self._applied_step = step_id
        if num_prefill_tokens >= _MIN_PREFILL_TOKENS:
            self._prefill.note_prefill()


def _num_loadable_blocks(request: Request, block_size: int) -> int:
    """At least the prompt's last token has to be computed."""
    return (len(request.prompt_token_ids) - 1) // block_size
