"""Drives one executor: its core Scheduler on one side, its session on the other. Decides nothing that the core can decide.

All of it runs in one event loop. Nothing in the path of a step waits: a result is applied, its news are handed to the
requests, and the next plan goes out in the same breath, while the executor works on the plan that was sent ahead.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from common.clock import Clock
from common.degraded import DegradedPaths
from common.errors import ExecutorLost, NoExecutor, OctavoError, Unavailable
from common.ids import BlockKey, ExecutorId, RequestId, SeqId
from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc import convert
from scheduler_svc.block_traffic import BlockTraffic
from scheduler_svc.clients.block_store import BlockStore
from scheduler_svc.clients.executor import ExecutorConnector, ExecutorLink
from scheduler_svc.core.forecast.capacity import ExecutorCapacity
from scheduler_svc.core.placement import Candidate
from scheduler_svc.core.plan import SchedulerStats, StepPlan
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler, SchedulerConfig
from scheduler_svc.core_maker import CoreMaker
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.generation import Generation
from scheduler_svc.outlook import Outlook
from scheduler_svc.residents import Residents
from scheduler_svc.step_totals import StepTotals


class ExecutorDriver:
    """One executor and everything that is queued or runs there.

    Attributes:
        info: of the last session; None before the first.
        scheduler: the core; None before the first session.
        is_connected: a session is open.
        residents: the requests that are here.
        problem: why the last session ended or there was none.

    Args:
        on_end: called once for every generation that ends here.
        cores: makes what decides.
    """

    def __init__(
        self,
        connector: ExecutorConnector,
        config: EngineConfig,
        clock: Clock,
        store: BlockStore,
        degraded: DegradedPaths,
        on_end: Callable[[Generation], None],
        cores: CoreMaker,
    ):
        self.address = connector.address
        self.info: pb.ExecutorInfo | None = None
        self.scheduler: Scheduler | None = None
        self.residents = Residents(self, clock)
        self.totals = StepTotals()
        self.problem: OctavoError = NoExecutor("not tried yet")
        self._config = config
        self._clock = clock
        self._store = store
        self._degraded = degraded
        self._on_end = on_end
        self._cores = cores
        self._run_ahead = cores.run_ahead(config.run_ahead)
        self._scheduler_config: SchedulerConfig | None = None
        self._link: ExecutorLink | None = None
        self._traffic: BlockTraffic | None = None
        self._outlook: Outlook | None = None
        self._outstanding: deque[StepPlan] = deque()  # without a result
        self._step_offset: int | None = None
        self._plan_timer: asyncio.TimerHandle | None = None
        self._save_timer: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.Timeout | None = None
        self._defect: Exception | None = None
        self._is_pump_due = False

    @property
    def generations(self) -> dict[RequestId, Generation]:
        """All requests that are here, by id."""
        return self.residents.generations

    @property
    def is_connected(self) -> bool:
        """A session is open."""
        return self._link is not None

    def stats(self) -> SchedulerStats:
        """Gauges and counters of the core."""
        return SchedulerStats() if self.scheduler is None else self.scheduler.stats()

    def load_bytes_per_s(self, tier: str) -> float:
        """How fast blocks come from a tier lately; 0: not known."""
        return 0.0 if self._traffic is None else self._traffic.load_bytes_per_s(tier)

    @property
    def is_loading(self) -> bool:
        """Blocks are on their way from the store, for a request."""
        return self._traffic is not None and self._traffic.is_loading

    def num_device_blocks(self, keys: Sequence[BlockKey]) -> int:
        """Leading blocks of a chain that the device has."""
        return (
            0 if self.scheduler is None else self.scheduler.num_device_tokens(keys[0], keys) // self.scheduler.config.block_size
        )

    def expect_blocks(self, num_blocks: float) -> None:
        """Probably not more than these blocks of the device will be taken in the next seconds."""
        if self._traffic is not None and self._link is not None:
            self._traffic.expect_blocks(num_blocks)

    def capacity(self, mean_sequence_tokens: float) -> ExecutorCapacity | None:
        """What the executor can do, see measured_capacity; None: not known yet."""
        return None if self._outlook is None else self._outlook.capacity(mean_sequence_tokens)

    def candidate(self, generation: Generation, num_output_tokens: float) -> Candidate:
        """What placement weighs of an executor that is connected; num_output_tokens: that a sample will probably get."""
        assert self._outlook is not None and self._traffic is not None, f"executor {self.address} was never connected"
        return self._outlook.candidate(generation, num_output_tokens, self._traffic.num_arriving_tokens)

    # Sessions

    async def run_session(self, link: ExecutorLink) -> None:
        """Drives the executor until its session ends; then every running sequence waits for the next one."""
        self._open(link)
        try:
            async with asyncio.timeout(None) as self._watchdog:
                self._watch()
                async for event in link.events():
                    self._handle(event)
        except TimeoutError:
            if self._defect is not None:
                raise self._defect from None
            raise Unavailable(
                f"executor {self.address}: no result of a step within {self._config.step_timeout_s:.0f} s"
            ) from None
        finally:
            self._watchdog = None
            self._link = None
            if self._traffic is not None:
                self._traffic.close()
            for timer in (self._plan_timer, self._save_timer):
                if timer is not None:
                    timer.cancel()
            self._plan_timer = self._save_timer = None
            self._outstanding.clear()
            self._run_ahead.restart()
            self.residents.end_fruitless(self._lost)
            if self.scheduler is not None:
                self.scheduler.reset()

    def _open(self, link: ExecutorLink) -> None:
        info = link.info
        config = self._config.limits_of(info)
        if self.scheduler is None or config != self._scheduler_config:
            moving = self.release_all()
            self.scheduler = self._cores.scheduler(config, self._run_ahead, self._config.policy, info)
            self._scheduler_config = config
            for generation in moving:
                try:
                    self.adopt(generation)
                except OctavoError as error:
                    generation.output.fail(error)
                    self._on_end(generation)
        self._outlook = Outlook(ExecutorId(self.address), self.scheduler, info, self._run_ahead.step_times)
        self._traffic = BlockTraffic(
            self.scheduler,
            info,
            self._config,
            self._store,
            self._degraded,
            self._clock,
            self._run_ahead,
            self._send_due_loads,
        )
        self.info = info
        self._link = link
        self._step_offset = None
        self._defect = None
        self._pump()

    def _handle(self, event: pb.RunSessionResponse) -> None:
        assert self._traffic is not None
        match event.WhichOneof("event"):
            case "result":
                self._apply(event.result)
            case "blocks_loaded":
                self._traffic.end_load(event.blocks_loaded)
            case "blocks_saved":
                self._traffic.end_save(event.blocks_saved)
            case other:
                raise OctavoError(f"executor {self.address}: unexpected event {other}")
        self._send_due_loads()
        self._pump()

    def _send_due_loads(self) -> None:
        """Before the next plan: who is loaded for is not in it."""
        if self._link is not None and self._traffic is not None:
            for load in self._traffic.due_loads():
                self._link.send(load)

    def _watch(self) -> None:
        """An executor that owes a result and says nothing is lost after a while; one that owes nothing may be silent."""
        if self._watchdog is not None:
            is_due = len(self._outstanding) > 0
            loop = asyncio.get_running_loop()
            self._watchdog.reschedule(loop.time() + self._config.step_timeout_s if is_due else None)

    async def saves_end(self) -> None:
        """Returns when no save is under way in this session, or the session is over."""
        traffic = self._traffic
        if self._link is not None and traffic is not None:
            await traffic.no_save_runs.wait()

    async def all_saved(self) -> None:
        """Returns when the store has every block that it is to have of this session, or the session is over."""
        traffic = self._traffic
        if self._link is not None and traffic is not None:
            await traffic.all_saved.wait()

    # Steps

    def _pump(self) -> None:
        """Sends plans until enough are under way or nothing can run."""
        self._is_pump_due = False
        if self._link is None or self.scheduler is None or self._traffic is None:
            return
        if self._plan_timer is not None:
            self._plan_timer.cancel()
            self._plan_timer = None
        while (due_s := self._run_ahead.due_s(now_s := self._clock.now())) is not None:
            if due_s > now_s:
                self._plan_timer = asyncio.get_running_loop().call_later(due_s - now_s, self._plan_is_due)
                break
            plan = self.scheduler.schedule(now_s)
            if plan is None:
                break
            if self._step_offset is None:  # a session counts from 1
                self._step_offset = plan.step_id - 1
            self._link.send(convert.plan_command(plan, plan.step_id - self._step_offset))
            self._run_ahead.note_sent(plan.work, self._clock.now())
            self._outstanding.append(plan)
            for sequence in plan.new_sequences:
                self.residents.note_admitted(sequence.seq_id, self.scheduler.cached_tokens)
            for seq_id in plan.dropped_seq_ids:  # preempted, or ended
                if (generation := self.residents.of_sequence(seq_id)) is not None:
                    self._traffic.bring_back(generation.request)
            self._watch()
        while (save := self._traffic.next_save(len(self._outstanding), self._clock.now())) is not None:
            self._link.send(save)
        if (due_s := self._traffic.save_due_s) is not None and self._save_timer is None:
            delay_s = max(0.0, due_s - self._clock.now())
            self._save_timer = asyncio.get_running_loop().call_later(delay_s + 0.001, self._save_is_due)

    def _pump_soon(self) -> None:
        """Pumps after everything that is ready now, so that requests of one moment share a step."""
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self._pump_or_end)

    def _plan_is_due(self) -> None:
        self._plan_timer = None
        self._pump_or_end()

    def _save_is_due(self) -> None:
        self._save_timer = None
        self._pump_or_end()

    def _pump_or_end(self) -> None:
        try:
            self._pump()
        except Exception as defect:  # nobody above would notice: it has to end the session
            self._defect = defect
            if self._watchdog is not None:
                self._watchdog.reschedule(asyncio.get_running_loop().time())

    def _apply(self, result: pb.StepResult) -> None:
        assert self.scheduler is not None and self._traffic is not None
        plan = self._outstanding.popleft() if self._outstanding else None
        if plan is None or plan.step_id - (self._step_offset or 0) != result.step_id:
            raise OctavoError(f"executor {self.address}: result of step {result.step_id} out of order")
        self._watch()
        timings = result.timings
        step_s = timings.prepare_s + timings.forward_s + timings.sample_s
        self.totals.add(step_s, timings.idle_s)
        self._traffic.note_step(plan.step_id, plan.work.num_prefill_tokens)
        self._run_ahead.note_ended(step_s, timings.idle_s, self._clock.now())
        updates = self.scheduler.apply(plan.step_id, convert.sampled_tokens(result), convert.sequence_errors(result))
        logprobs = convert.token_logprobs(result) if self.residents.want_logprobs else {}
        self.residents.deliver(updates, logprobs)

    # Requests

    async def submit(self, generation: Generation) -> None:
        """Queues a request here.

        Raises:
            QueueFull, KvPoolTooSmall: see Scheduler.add.
        """
        found = await self._traffic.look_up(generation) if self._traffic is not None else None
        if generation.output.is_over:  # cancelled during the look-up
            return
        self.adopt(generation)
        if self._link is not None and self._traffic is not None and found is not None:
            self._traffic.begin_load(generation.request, found)
            self._send_due_loads()

    def adopt(self, generation: Generation) -> None:
        """Queues a request here without a look at the store.

        Raises:
            ExecutorLost: no session was ever open here.
            QueueFull, KvPoolTooSmall: see Scheduler.add.
        """
        if self.scheduler is None:
            raise ExecutorLost(f"executor {self.address} is gone")
        request = generation.request
        generation.seq_ids = self.scheduler.add(request)
        self.residents.add(generation)
        self._pump_soon()

    def release_all(self) -> list[Generation]:
        """Takes out every request with the tokens it has, for another executor."""
        return self._release(self.scheduler.evacuate() if self.scheduler is not None else [])

    def release_queued(self) -> list[Generation]:
        """Takes out every request that has not begun, for another executor."""
        return self._release(self.scheduler.drain() if self.scheduler is not None else [])

    def _release(self, requests: Sequence[Request]) -> list[Generation]:
        released = []
        for request in requests:
            generation = self.generations[request.request_id]
            self._forget(generation)
            generation.request = request
            released.append(generation)
        return released

    def note_output(self, generation: Generation, seq_id: SeqId | None) -> None:
        """The output of a request that is here ended between two pushes: altogether, or as far as one sample goes."""
        if generation.output.is_over:
            self.end(generation, None)
        elif seq_id is not None and self.residents.of_sequence(seq_id) is generation:
            self.end_sample(seq_id)
            self._pump_soon()

    def give_up(self) -> None:
        """Ends every request that is here: the executor does not come back."""
        for generation in list(self.generations.values()):
            self.end(generation, self._lost(generation, "is gone and nobody took over"))

    def discard(self, error: OctavoError) -> None:
        """Ends every request that is here and forgets the core, whose state cannot be trusted any more."""
        self.scheduler = self._outlook = None
        for generation in list(self.generations.values()):
            self.end(generation, error)

    def expire(self) -> None:
        """Ends the requests that have waited, or run, longer than they want to; called when one may have."""
        if self.scheduler is not None:
            self.residents.end_late(self.scheduler.expire(self._clock.now()))

    def end_sample(self, seq_id: SeqId) -> None:
        """The output of one sample is over, its request is not."""
        if self.scheduler is not None:
            self.scheduler.finish_sequence(seq_id)

    def end(self, generation: Generation, error: OctavoError | None) -> None:
        """A request is over, by its output or for a reason; one that is not here is fine. Its blocks are free at once."""
        if not self.residents.has(generation):
            return
        request_id = generation.request.request_id
        self._forget(generation)
        if self.scheduler is not None:
            self.scheduler.cancel(request_id)  # nothing is left there when it ended by its tokens
        if error is not None:
            generation.output.fail(error)
        generation.ended_at_s = self._clock.now()
        self._on_end(generation)
        self._pump_soon()

    def _lost(self, generation: Generation, what: str) -> ExecutorLost:
        metadata = {"generatedTokens": str(generation.output.num_tokens)}
        return ExecutorLost(f"executor {self.address} {what}", metadata=metadata)

    def _forget(self, generation: Generation) -> None:
        self.residents.remove(generation)
        if self._traffic is not None:
            self._traffic.forget(generation.request.request_id)
