"""The worker's main thread: commands of one session after the other, in their order. Knows frames, plans and the engine.

It never waits for the scheduler while a plan is queued: the next step starts as soon as the result of the one before is
written. Loads and saves are handed to the transfer thread and run beside the steps. Commands and results travel by whichever
way inbox.py has for the session.
"""

import functools
import logging
import time
from collections import deque

from common.errors import InvalidParameter
from common.frames import Frame, FrameKind
from executor_svc import convert, metrics
from executor_svc.engine import Engine
from executor_svc.inbox import Inbox
from executor_svc.runner import StepOutcome
from executor_svc.transfer import LoadDone, SaveDone, TransferThread
from octavo.executor.v1 import executor_service_pb2 as pb

log = logging.getLogger(__name__)


class StepLoop:
    """Carries out the commands of one session after the other, on the main thread.

    Args:
        inbox: where commands come from.
        engine: that computes.
        save_drain_s: longest time at the end for saves that wait.
    """

    def __init__(self, inbox: Inbox, engine: Engine, *, save_drain_s: float = 0.0):
        self._inbox = inbox
        self._store = engine.store
        self._info = engine.info
        self._runner = engine.runner
        self._transfers = TransferThread(engine.blocks, engine.store, self._send_transfer)
        self._save_drain_s = save_drain_s
        self._session = 0
        self._commands: deque[tuple[float, bytes]] = deque()

    def run(self) -> None:
        """Returns once the front is gone and what waited for the store is saved, or dropped, and logged."""
        try:
            while (frames := self._inbox.receive(wait=not self._commands)) is not None:
                for frame in frames:
                    self._accept(frame)
                if self._commands:
                    self._carry_out(*self._commands.popleft())
        except ConnectionError:
            log.info("the front is gone")
        drained = self._transfers.drain(self._save_drain_s)
        if drained.num_saved or drained.num_dropped:
            level = logging.WARNING if drained.num_dropped else logging.INFO
            log.log(level, "saves at the end: %d blocks saved, %d dropped", drained.num_saved, drained.num_dropped)

    def _accept(self, frame: Frame) -> None:
        """Takes a frame in; no step runs meanwhile, so an old session's sequences go at once."""
        match frame.kind:
            case FrameKind.OPEN:
                self._end_session()
                self._session = frame.session
                self._transfers.start_session(frame.session)
                self._inbox.begin(frame.session)
                self._inbox.send_front(Frame(FrameKind.OPENED, frame.session))
            case FrameKind.COMMAND if frame.session == self._session:
                self._commands.append((time.monotonic(), frame.payload))
            case FrameKind.CLOSE if frame.session == self._session:
                self._hand_on_saves()
                self._end_session()
            case _:
                log.debug("frame %s of session %d ignored", frame.kind.name, frame.session)

    def _hand_on_saves(self) -> None:
        """Saves among the commands that will not be carried out: their blocks were computed before they were sent."""
        for _, payload in self._commands:
            command = pb.RunSessionRequest.FromString(payload)
            if command.WhichOneof("command") == "save_blocks":
                self._transfers.submit(self._session, convert.save_from_pb(command.save_blocks))

    def _end_session(self) -> None:
        self._commands.clear()
        self._runner.reset()
        self._inbox.end()
        self._session = 0

    def _carry_out(self, arrived_at: float, payload: bytes) -> None:
        command = pb.RunSessionRequest.FromString(payload)
        match command.WhichOneof("command"):
            case "plan":
                self._step(arrived_at, command.plan)
            case "load_blocks":
                self._transfers.submit(self._session, convert.load_from_pb(command.load_blocks))
            case "save_blocks":
                self._transfers.submit(self._session, convert.save_from_pb(command.save_blocks))
            case other:
                self._fail_session(f"command: {other} is not expected here")

    def _step(self, arrived_at: float, message: pb.StepPlan) -> None:
        report = functools.partial(self._send_result, self._session)
        try:
            self._runner.submit(convert.plan_from_pb(message), report, arrived_at=arrived_at)
        except InvalidParameter as error:
            self._fail_session(error.message)

    def _send_result(self, session: int, outcome: StepOutcome | Exception) -> None:
        """Runs on whatever thread the runner reports on."""
        if isinstance(outcome, Exception):
            log.error("the device failed, the worker ends", exc_info=outcome)
            self._save_drain_s = 0.0  # nothing can be read from it any more
            self._inbox.shut_down()
            return
        result = convert.outcome_to_pb(outcome, idle_s=outcome.idle_s)
        self._inbox.send(Frame(FrameKind.EVENT, session, pb.RunSessionResponse(result=result).SerializeToString()))
        metrics.observe_step(outcome, outcome.idle_s)

    def _fail_session(self, message: str) -> None:
        """The scheduler sent nonsense: its session ends, the process goes on."""
        log.warning("session %d ends: %s", self._session, message)
        self._inbox.send_front(Frame(FrameKind.FAILED, self._session, message.encode()))
        self._end_session()

    def _send_transfer(self, session: int, done: LoadDone | SaveDone) -> None:
        """Runs on the transfer thread."""
        self._inbox.send(Frame(FrameKind.EVENT, session, convert.transfer_to_pb(done).SerializeToString()))
        metrics.observe_transfer(done)
        if self._store is not None and self._store.transport != (self._info.kv_transport, self._info.kv_transport_reason):
            self._info.kv_transport, self._info.kv_transport_reason = self._store.transport
            self._inbox.send_front(Frame(FrameKind.READY, payload=self._info.SerializeToString()))
