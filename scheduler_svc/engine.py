"""All executors as one engine: requests from their arrival to their end, whatever becomes of the executors (fleet.py).

Knows requests as token ids and outputs as sinks; knows no text and no wire of the public API. Usable without any server:

    engine = Engine([GrpcExecutor(address)], EngineConfig(), MonotonicClock(), store, degraded)
    await engine.start()
    generation = await engine.submit(request, output)
    engine.cancel(request_id, error)
    await engine.stop()
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.clock import Clock
from common.degraded import DegradedPaths
from common.errors import Cancelled, Draining, DuplicateRequest, OctavoError
from common.ids import BlockKey, RequestId, SeqId
from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc.clients.block_store import BlockStore
from scheduler_svc.clients.executor import ExecutorConnector
from scheduler_svc.core.forecast.turns import Turns
from scheduler_svc.core.request import Request
from scheduler_svc.core.token_rates import TokenRates
from scheduler_svc.core_maker import CoreMaker, PlainCores
from scheduler_svc.driver import ExecutorDriver
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.fleet import Fleet
from scheduler_svc.generation import Generation, Output
from scheduler_svc.load_watch import LoadWatch


@dataclass(slots=True)
class EngineCounters:
    """Counters since start; the fields of octavo.scheduler.v1.Load."""

    num_finished_requests: int = 0
    num_failed_requests: int = 0
    num_cancelled_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    cached_tokens_by_tier: dict[str, int] = field(default_factory=dict)


class Engine:
    """See the module's first lines.

    Attributes:
        counters: of requests that ended.
        fleet: the executors.
        load_watch: of the load that is to come.
        turns: conversations that may go on.

    Args:
        connectors: how to reach each executor.
        model_name: "models/{name}" that executors must serve; empty: what the first one says.
        observe: called for every generation that ended, for metrics.
        cores: what makes the core of the executor at an address.
    """

    def __init__(
        self,
        connectors: Sequence[ExecutorConnector],
        config: EngineConfig,
        clock: Clock,
        store: BlockStore,
        degraded: DegradedPaths,
        *,
        model_name: str = "",
        observe: Callable[[Generation], None] = lambda generation: None,
        cores: Callable[[str], CoreMaker] = lambda address: PlainCores(),
    ):
        self.counters = EngineCounters()
        self.degraded = degraded
        self.store = store
        self.clock = clock
        self._observe = observe
        self.load_watch = LoadWatch(clock)
        self.turns = Turns()
        self._watching: asyncio.Task[None] | None = None
        self.fleet = Fleet(
            config,
            degraded,
            lambda connector, on_end: ExecutorDriver(connector, config, clock, store, degraded, on_end, cores(connector.address)),
            self._on_end,
            self.load_watch.expected_output_tokens,
            model_name,
        )
        for connector in connectors:
            self.fleet.add(connector)
        self._token_rates = TokenRates(config.tenants)
        self._generations: dict[RequestId, Generation] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    @property
    def drivers(self) -> list[ExecutorDriver]:
        """One per executor."""
        return self.fleet.drivers

    @property
    def model(self) -> pb.ExecutorInfo | None:
        """What the executors serve, from the first that was connected; None before."""
        return self.fleet.model

    # Life

    async def start(self) -> None:
        """Begins to look for executors."""
        self.fleet.start()
        self._watching = asyncio.create_task(self.load_watch.run(lambda: self.drivers), name="load watch")

    def begin_drain(self) -> None:
        """From now on new requests are refused; running ones go on."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Returns when no request is left."""
        await self._idle.wait()

    async def stop(self) -> None:
        """Ends every request and every session."""
        self.begin_drain()
        for request_id in list(self._generations):
            self.cancel(request_id, Draining("the server stops"))
        await self.fleet.stop()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    # Requests

    async def served_model(self) -> pb.ExecutorInfo:
        """What is served; waits a moment for an executor.

        Raises:
            Draining, NoExecutor, ModelLoading.
        """
        if self._is_draining:
            raise Draining("the server is about to stop", retry_after_s=1.0)
        return await self.fleet.connected_model()

    async def first_model(self) -> pb.ExecutorInfo:
        """What is served; waits for the first executor, however long that takes."""
        return await self.fleet.first_model()

    async def num_connected_executors(self) -> int:
        """Executors with an open session."""
        return sum(driver.is_connected for driver in self.drivers)

    async def submit(self, request: Request, output: Output) -> Generation:
        """Takes a request; its output is pushed from now on.

        Raises:
            DuplicateRequest, Draining, NoExecutor, Overloaded, KvPoolTooSmall.
        """
        if request.request_id in self._generations:
            raise DuplicateRequest(f"request_id: {request.request_id!r} is in use", metadata={"requestId": request.request_id})
        self._token_rates.take(request, self.clock.now())
        generation = Generation(request, output)
        self._generations[request.request_id] = generation
        self._idle.clear()
        self.load_watch.note_arrival(request)
        try:
            model = await self.served_model()
            self.turns.note_arrival(generation.prompt_keys(model.block_size), self.clock.now())
            driver = self.fleet.choose(generation)
            await driver.submit(generation)
            if not driver.is_connected:  # lost during the look-up
                self.fleet.move_from(driver)
        except BaseException:
            self._token_rates.give_back(request)
            self._remove(generation)
            raise
        return generation

    def cancel(self, request_id: RequestId, error: OctavoError) -> bool:
        """Ends a request in whatever phase; its output fails with the error. Its blocks are free for the next plan.

        Returns:
            False: no such request.
        """
        generation = self._generations.get(request_id)
        if generation is None:
            return False
        generation.is_cancelled = True
        for driver in self.drivers:
            if driver.generations.get(request_id) is generation:
                driver.end(generation, error)
                return True
        generation.output.fail(error)  # on its way to a driver
        self._on_end(generation)
        return True

    async def cancel_generation(self, request_id: RequestId) -> bool:
        """Ends a request because its client asked for it.

        Returns:
            False: no such request.
        """
        return self.cancel(request_id, Cancelled("cancelled by CancelGeneration"))

    def note_output(self, generation: Generation, seq_id: SeqId | None = None) -> None:
        """An output ended between two pushes: altogether (see Output.is_over), or as far as one sample goes.

        Args:
            generation: whose output it is.
            seq_id: of the sample, as its last update had it; None: it had none yet.
        """
        for driver in self.drivers:
            if driver.generations.get(generation.request.request_id) is generation:
                driver.note_output(generation, seq_id)
                return
        if generation.output.is_over and self._generations.get(generation.request.request_id) is generation:
            self._on_end(generation)  # on its way to a driver

    def abandon(self, generation: Generation) -> None:
        """Ends a request that nobody wants any more. One that has ended is fine."""
        if self._generations.get(generation.request.request_id) is generation:
            self.cancel(generation.request.request_id, Cancelled("the client is gone"))

    @property
    def num_open_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._generations)

    def flush_cache(self) -> int:
        """Forgets cached blocks that nobody uses, on every device.

        Returns:
            How many.
        """
        return sum(driver.scheduler.flush_cache() for driver in self.drivers if driver.scheduler is not None)

    def num_device_blocks(self, keys: Sequence[BlockKey]) -> int:
        """Leading blocks of a chain that a device has; of the one that has most."""
        return max((driver.num_device_blocks(keys) for driver in self.drivers), default=0)

    def load_bytes_per_s(self, tier: str) -> float:
        """How fast blocks come from a tier to the devices lately; 0: not known."""
        speeds = [speed for driver in self.drivers if (speed := driver.load_bytes_per_s(tier))]
        return sum(speeds) / len(speeds) if speeds else 0.0

    async def saves_end(self, timeout_s: float) -> None:
        """Waits until no block is on its way to the store, but not longer than that."""
        try:
            async with asyncio.timeout(timeout_s):
                for driver in self.drivers:
                    await driver.saves_end()
        except TimeoutError:
            self.degraded.note("flush_incomplete", f"blocks were still on their way to the store after {timeout_s:g} s")

    def _remove(self, generation: Generation) -> None:
        if self._generations.get(generation.request.request_id) is generation:
            del self._generations[generation.request.request_id]
        if not self._generations:
            self._idle.set()

    def _on_end(self, generation: Generation) -> None:
        self._remove(generation)
        counters = self.counters
        if generation.is_cancelled:
            counters.num_cancelled_requests += 1
        elif generation.output.error is not None:
            counters.num_failed_requests += 1
        else:
            counters.num_finished_requests += 1
            if self.model is not None:
                self.turns.note_end(generation.prompt_keys(self.model.block_size), self.clock.now())
        counters.num_prompt_tokens += len(generation.request.prompt_token_ids)
        counters.num_output_tokens += generation.output.num_tokens
        counters.num_cached_tokens += generation.num_cached_tokens
        for tier, num_tokens in generation.cached_tokens_by_tier.items():
            counters.cached_tokens_by_tier[tier] = counters.cached_tokens_by_tier.get(tier, 0) + num_tokens
        self.load_watch.note_end(generation)
        self._observe(generation)
