"""Runs a workload through the production engine and driver in virtual time. Knows how they are put together; no trace format."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from common.block_hash import root_key
from common.degraded import DegradedPaths
from common.errors import OctavoError
from common.ids import BlockKey, RequestId
from scheduler_svc.clients.block_store import BlockStore
from scheduler_svc.core.request import Request, SamplingParams, StopConditions
from scheduler_svc.core_maker import CoreMaker, PlainCores
from scheduler_svc.engine import Engine
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.simulation.arrivals import Arrival
from scheduler_svc.simulation.device import SimulatedExecutor
from scheduler_svc.simulation.outcome import Outcome, Sample, Served
from scheduler_svc.simulation.output import TimedOutput
from scheduler_svc.simulation.profile import DeviceProfile
from scheduler_svc.simulation.virtual_time import VirtualTimeLoop

_ROOT = root_key(b"s" * 32)
_NUM_SAMPLES = 400


class NoStore:
    """A block store that is not there."""

    connected = False
    reason = "simulated"

    async def lookup(self, keys: Sequence[BlockKey], timeout_s: float, wait_s: float) -> list[str]:
        """Nothing."""
        return []

    async def prefetch(self, keys: Sequence[BlockKey], fingerprint: bytes, block_bytes: int) -> AsyncIterator[str]:
        """Nothing."""
        return
        yield ""

    async def note_use(self, keys: Sequence[BlockKey]) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Simulation:
    """What to simulate.

    Attributes:
        policy: of core/policies/choice.py.
        cores: make the core of each executor.
        config: of the engine.
        seed: of the times of steps.
        store: of blocks; only executors that say so use it.
        executor: makes each, by profile, index and seed.
        on_progress: called with the requests that have ended.
    """

    arrivals: Sequence[Arrival]
    profile: DeviceProfile
    num_executors: int = 1
    policy: str = "fair"
    cores: CoreMaker = field(default_factory=PlainCores)
    config: EngineConfig = field(default_factory=lambda: EngineConfig(max_waiting_requests=1 << 20, max_waiting_tokens=1 << 40))
    seed: int = 0
    store: BlockStore = field(default_factory=NoStore)
    executor: Callable[[DeviceProfile, int, int], SimulatedExecutor] = SimulatedExecutor
    on_progress: Callable[[int], None] = lambda num_ended: None

    def run(self) -> Outcome:
        """Runs it to the end of the last request."""
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(_Run(self).run())


class _Run:
    """The simulation while it runs."""

    def __init__(self, simulation: Simulation):
        self._simulation = simulation
        self._outcome = Outcome(simulation.policy, [Served(arrival) for arrival in simulation.arrivals])
        self._executors = [
            simulation.executor(simulation.profile, index, simulation.seed) for index in range(simulation.num_executors)
        ]
        self._num_ended = 0
        self._all_ended = asyncio.Event()

    async def run(self) -> Outcome:
        began_s = time.perf_counter()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop), "time has to be virtual"
        simulation, outcome = self._simulation, self._outcome
        config = replace(simulation.config, policy=simulation.policy)
        engine = Engine(self._executors, config, loop, simulation.store, DegradedPaths(), cores=lambda address: simulation.cores)
        await engine.start()
        await engine.served_model()
        start_s = loop.time()
        sampling = asyncio.create_task(self._sample(engine, start_s))
        submits = set()
        for number, served in enumerate(outcome.served):
            await asyncio.sleep(max(0.0, start_s + served.arrival.at_s - loop.time()))
            submit = asyncio.create_task(self._submit(engine, number, served, loop))
            submits.add(submit)
            submit.add_done_callback(submits.discard)
        await self._all_ended.wait()
        sampling.cancel()
        for served in outcome.served:
            served.first_s = None if served.first_s is None else served.first_s - start_s
            served.last_s = None if served.last_s is None else served.last_s - start_s
        stats = [driver.stats() for driver in engine.drivers]
        outcome.end_s = loop.time() - start_s
        outcome.num_steps = sum(driver.totals.num_steps for driver in engine.drivers)
        outcome.num_preemptions = sum(one.num_preemptions for one in stats)
        outcome.num_recomputed_tokens = sum(one.num_recomputed_tokens for one in stats)
        outcome.busy_s = sum(executor.busy_s for executor in self._executors)
        await engine.stop()
        outcome.took_s = time.perf_counter() - began_s
        return outcome

    async def _submit(self, engine: Engine, number: int, served: Served, loop: VirtualTimeLoop) -> None:
        arrival = served.arrival
        request = Request(
            request_id=RequestId(str(number)),
            prompt_token_ids=arrival.prompt(),
            sampling=SamplingParams(temperature=0.0),
            stop=StopConditions(arrival.num_output_tokens),
            root_key=_ROOT,
            arrival_s=loop.time(),
            tenant=arrival.tenant,
            service_class=arrival.service_class,
        )
        output = TimedOutput(served, loop, self._note_end)
        try:
            await engine.submit(request, output)
        except OctavoError as error:
            output.fail(error)

    def _note_end(self) -> None:
        self._num_ended += 1
        self._simulation.on_progress(self._num_ended)
        if self._num_ended == len(self._outcome.served):
            self._all_ended.set()

    async def _sample(self, engine: Engine, start_s: float) -> None:
        """Looks at the whole from time to time."""
        loop = asyncio.get_running_loop()
        every_s = max(0.01, 1.25 * self._simulation.arrivals[-1].at_s / _NUM_SAMPLES)
        while True:
            stats = [driver.stats() for driver in engine.drivers]
            by_tenant: dict[str, int] = {}
            for one in self._outcome.served:
                tenant = one.arrival.tenant
                num_tokens = one.num_tokens + (one.arrival.num_prompt_tokens if one.num_tokens else 0)
                by_tenant[tenant] = by_tenant.get(tenant, 0) + num_tokens
            self._outcome.samples.append(
                Sample(
                    at_s=loop.time() - start_s,
                    num_waiting=sum(one.num_waiting_requests for one in stats),
                    num_running=sum(one.num_running_sequences for one in stats),
                    num_used_blocks=sum(one.num_used_blocks for one in stats),
                    num_blocks=sum(one.num_blocks for one in stats),
                    tokens_by_tenant=by_tenant,
                )
            )
            await asyncio.sleep(every_s)
