"""The executors of an engine: which there are, the sessions with them, who joins and who leaves while requests run.

Knows executors and where requests go when one is lost. Does not know what a request is to its client.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.degraded import DegradedPaths
from common.errors import InvalidParameter, ModelLoading, NoExecutor, OctavoError, StaleEpoch
from common.ids import ExecutorId
from octavo.executor.v1 import executor_service_pb2 as pb
from scheduler_svc.clients.executor import ExecutorConnector, ExecutorLink
from scheduler_svc.core.placement import choose_executor
from scheduler_svc.core.request import Request
from scheduler_svc.driver import ExecutorDriver
from scheduler_svc.engine_config import EngineConfig
from scheduler_svc.generation import Generation

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0
_FENCED_PAUSE_S = 5.0


@dataclass(slots=True, eq=False)
class _Member:
    """One executor. It leaves when leaving is set, as soon as is_empty is."""

    connector: ExecutorConnector
    driver: ExecutorDriver
    session: "asyncio.Task[None] | None" = None
    leaving: "asyncio.Task[None] | None" = None
    is_empty: asyncio.Event = field(default_factory=asyncio.Event)


class Fleet:
    """See the module's first lines.

    Attributes:
        model: what the executors serve, from the first that was connected; None before.

    Args:
        make_driver: of an executor, with what is to be called for every generation that ends there.
        on_end: called for every generation that ends at an executor, or finds none to go on at.
        expected_output_tokens: of one sample of a request.
        model_name: "models/{name}" that executors must serve; empty: what the first one says.
    """

    def __init__(
        self,
        config: EngineConfig,
        degraded: DegradedPaths,
        make_driver: Callable[[ExecutorConnector, Callable[[Generation], None]], ExecutorDriver],
        on_end: Callable[[Generation], None],
        expected_output_tokens: Callable[[Request], float],
        model_name: str,
    ):
        self.model: pb.ExecutorInfo | None = None
        self._config = config
        self._degraded = degraded
        self._make_driver = make_driver
        self._on_end = on_end
        self._expected_output_tokens = expected_output_tokens
        self._model_name = model_name
        self._members: dict[str, _Member] = {}
        self._hello = pb.Hello(scheduler_id="scheduler", epoch=random.SystemRandom().getrandbits(64))
        self._is_started = False
        self._connected = asyncio.Event()
        self._model_known = asyncio.Event()
        self._give_up_timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def drivers(self) -> list[ExecutorDriver]:
        """One per executor, those that leave included."""
        return [member.driver for member in self._members.values()]

    def is_leaving(self, driver: ExecutorDriver) -> bool:
        """Whether it gets no new requests because it is to be removed."""
        member = self._members.get(driver.address)
        return member is not None and member.leaving is not None

    # Life

    def start(self) -> None:
        """Begins to look for executors."""
        self._is_started = True
        for member in self._members.values():
            self._keep(member)

    async def stop(self) -> None:
        """Ends every session."""
        members = list(self._members.values())
        tasks = [task for member in members for task in (member.session, member.leaving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for timer in self._give_up_timers.values():
            timer.cancel()

    async def connected_model(self) -> pb.ExecutorInfo:
        """What is served; waits a moment for an executor.

        Raises:
            NoExecutor, ModelLoading.
        """
        try:
            async with asyncio.timeout(self._config.executor_wait_s):
                while not any(driver.is_connected for driver in self.drivers):
                    self._connected.clear()
                    await self._connected.wait()
        except TimeoutError:
            reasons = "; ".join(f"{driver.address}: {driver.problem.message}" for driver in self.drivers) or "none is configured"
            is_loading = any(isinstance(driver.problem, ModelLoading) for driver in self.drivers)
            error_class = ModelLoading if is_loading else NoExecutor
            raise error_class(f"no executor is connected ({reasons})", retry_after_s=1.0) from None
        assert self.model is not None
        return self.model

    async def first_model(self) -> pb.ExecutorInfo:
        """What is served; waits for the first executor, however long that takes."""
        await self._model_known.wait()
        assert self.model is not None
        return self.model

    # Joining and leaving

    def add(self, connector: ExecutorConnector) -> None:
        """An executor joins. One that is about to leave stays.

        Raises:
            InvalidParameter: it is here already.
        """
        member = self._members.get(connector.address)
        if member is None:
            member = self._members[connector.address] = _Member(connector, self._make_driver(connector, self._ended))
            if self._is_started:
                self._keep(member)
        elif member.leaving is not None:
            member.leaving.cancel()
            member.leaving = None
        else:
            raise InvalidParameter("address", f"{connector.address} is an executor of this scheduler already")

    def remove(self, address: str, drain_s: float) -> None:
        """An executor leaves: it gets no new requests, those that have not begun go to others now, and those that run get time.

        What they leave behind is saved to the store in the same time.

        Whoever still runs after that time goes on at another executor, if there is one; else it fails with EXECUTOR_LOST.

        Raises:
            InvalidParameter: it is not here.
        """
        member = self._members.get(address)
        if member is None:
            raise InvalidParameter("address", f"{address} is no executor of this scheduler")
        if member.leaving is not None:
            member.leaving.cancel()
        member.leaving = asyncio.create_task(self._let_go(member, drain_s), name=f"executor {address} leaves")
        if self._others(member.driver):
            self._place(member.driver, member.driver.release_queued())

    async def _let_go(self, member: _Member, drain_s: float) -> None:
        driver = member.driver
        log.info("executor %s: leaves; %d requests get %.0f s", driver.address, len(driver.generations), drain_s)
        self._note_empty(member)
        try:
            async with asyncio.timeout(drain_s):
                await member.is_empty.wait()
                await driver.all_saved()
        except TimeoutError:
            num_requests = len(driver.generations)
            log.warning("executor %s: not all in time, %d requests left or blocks unsaved", driver.address, num_requests)
        del self._members[driver.address]
        self.move_from(driver)
        if member.session is not None:
            member.session.cancel()
            await asyncio.gather(member.session, return_exceptions=True)
        if (timer := self._give_up_timers.pop(driver.address, None)) is not None:
            timer.cancel()
        log.info("executor %s: has left", driver.address)

    def _ended(self, generation: Generation) -> None:
        self._on_end(generation)
        for member in self._members.values():
            self._note_empty(member)

    def _note_empty(self, member: _Member) -> None:
        if member.driver.generations:
            member.is_empty.clear()
        else:
            member.is_empty.set()

    # Requests

    def choose(self, generation: Generation) -> ExecutorDriver:
        """Where a request runs.

        Raises:
            NoExecutor: no executor is connected.
        """
        connected = {ExecutorId(driver.address): driver for driver in self.drivers if driver.is_connected}
        staying = {name: driver for name, driver in connected.items() if not self.is_leaving(driver)}
        among = staying or connected
        if len(among) == 1:
            return next(iter(among.values()))
        num_output_tokens = self._expected_output_tokens(generation.request)
        return among[choose_executor([driver.candidate(generation, num_output_tokens) for driver in among.values()])]

    def move_from(self, source: ExecutorDriver) -> None:
        """Requests of a lost executor go on elsewhere, if there is anybody else; those of one that has left do so or fail."""
        if self._others(source):
            self._place(source, source.release_all())
        elif source.address not in self._members:
            source.give_up()

    def _others(self, source: ExecutorDriver) -> Sequence[ExecutorDriver]:
        return [driver for driver in self.drivers if driver.is_connected and driver is not source and not self.is_leaving(driver)]

    def _place(self, source: ExecutorDriver, generations: Sequence[Generation]) -> None:
        for generation in generations:
            try:
                self.choose(generation).adopt(generation)
            except OctavoError as error:
                log.warning("request %s cannot move from %s: %s", generation.request.request_id, source.address, error.message)
                generation.output.fail(error)
                self._on_end(generation)

    # Sessions

    def _keep(self, member: _Member) -> None:
        name = f"executor {member.driver.address}"
        member.session = asyncio.create_task(self._keep_connected(member.connector, member.driver), name=name)

    async def _keep_connected(self, connector: ExecutorConnector, driver: ExecutorDriver) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                link = await connector.connect(self._hello)
                try:
                    if self._accepts(driver, link.info):
                        backoff_s = _FIRST_BACKOFF_S
                        await self._run_session(driver, link)
                finally:
                    await link.close()
            except StaleEpoch as error:  # another scheduler drives it: taking turns at once would help nobody
                self._note_problem(driver, error)
                backoff_s = _FENCED_PAUSE_S
            except ModelLoading as error:  # it is asked again and again, so that nothing waits once it is there
                self._note_problem(driver, error)
                backoff_s = _FIRST_BACKOFF_S
            except OctavoError as error:
                self._note_problem(driver, error)
            except Exception:
                log.exception("executor %s: the session failed", driver.address)
                driver.discard(OctavoError("internal error; the server's log has the details"))
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _note_problem(self, driver: ExecutorDriver, error: OctavoError) -> None:
        if driver.info is not None:
            self._degraded.note("executor_unavailable", f"{driver.address}: {error.message}")
        elif error.message != driver.problem.message:  # at its start an executor may take its time
            log.info("executor %s: waiting: %s", driver.address, error.message)
        driver.problem = error

    def _accepts(self, driver: ExecutorDriver, info: pb.ExecutorInfo) -> bool:
        if self._model_name and info.model != self._model_name:
            problem = f"serves {info.model}, not {self._model_name}"
        elif self.model is not None and (info.model, info.kv_fingerprint) != (self.model.model, self.model.kv_fingerprint):
            problem = f"serves {info.model} with other weights or another KV layout than the first executor"
        else:
            self.model = self.model or info
            self._model_known.set()
            return True
        driver.problem = NoExecutor(f"refused: {problem}")
        self._degraded.note("executor_refused", f"{driver.address}: {problem}")
        return False

    async def _run_session(self, driver: ExecutorDriver, link: ExecutorLink) -> None:
        log.info("executor %s: connected", driver.address)
        session = asyncio.ensure_future(driver.run_session(link))
        await asyncio.sleep(0)  # the driver opens the session
        self._degraded.clear("executor_unavailable")
        self._connected.set()
        if (timer := self._give_up_timers.pop(driver.address, None)) is not None:
            timer.cancel()
        for other in self.drivers:
            if not other.is_connected:
                self.move_from(other)
        try:
            await session
        finally:
            session.cancel()
            await asyncio.gather(session, return_exceptions=True)
            log.warning("executor %s: lost with %d requests", driver.address, len(driver.generations))
            self.move_from(driver)
            self._give_up_timers[driver.address] = asyncio.get_running_loop().call_later(
                self._config.executor_lost_timeout_s, self._give_up, driver
            )

    def _give_up(self, driver: ExecutorDriver) -> None:
        if not driver.is_connected:
            driver.give_up()
