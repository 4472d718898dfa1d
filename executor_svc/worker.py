"""The process that owns model, pool and step loop: python -m executor_svc.worker <fd of the pipe>.

Knows frames, plans and the engine. Does not know gRPC, who schedules, or why. The front starts it and is its only user; when
the pipe ends, the worker ends. It never waits for the scheduler while a plan is queued: the next step starts as soon as the
result of the one before is written.
"""

import gc
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from common.errors import InvalidParameter, StartupError
from common.logs import setup_logging
from executor_svc.pipe import Frame, FrameKind, FramePipe
from executor_svc.settings import ExecutorSettings
from octavo.executor.v1 import executor_service_pb2 as pb

if TYPE_CHECKING:
    from executor_svc.engine import Engine

log = logging.getLogger(__name__)


class StepLoop:
    """Carries out the commands of one session after the other, on the main thread."""

    def __init__(self, pipe: FramePipe, engine: "Engine"):
        from executor_svc.transfer import TransferThread

        self._pipe = pipe
        self._runner = engine.runner
        self._transfers = TransferThread(engine.pool, engine.store, self._send_transfer)
        self._session = 0
        self._commands: deque[tuple[float, bytes]] = deque()
        self._step_ended_at = time.monotonic()

    def run(self) -> None:
        """Returns once the front is gone."""
        try:
            while (frames := self._pipe.receive(wait=not self._commands)) is not None:
                for frame in frames:
                    self._accept(frame)
                if self._commands:
                    self._carry_out(*self._commands.popleft())
        except ConnectionError:
            log.info("the front is gone")
        self._transfers.stop()

    def _accept(self, frame: Frame) -> None:
        """Takes a frame in; no step runs meanwhile, so an old session's sequences go at once."""
        match frame.kind:
            case FrameKind.OPEN:
                self._end_session()
                self._session = frame.session
                self._transfers.start_session(frame.session)
                self._pipe.send(Frame(FrameKind.OPENED, frame.session))
            case FrameKind.COMMAND if frame.session == self._session:
                self._commands.append((time.monotonic(), frame.payload))
            case FrameKind.CLOSE if frame.session == self._session:
                self._end_session()
            case _:
                log.debug("frame %s of session %d ignored", frame.kind.name, frame.session)

    def _end_session(self) -> None:
        self._commands.clear()
        self._runner.reset()
        self._session = 0

    def _carry_out(self, arrived_at: float, payload: bytes) -> None:
        from executor_svc import convert

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
        from executor_svc import convert

        began_at = max(arrived_at, self._step_ended_at)
        idle_s = max(0.0, arrived_at - self._step_ended_at)
        try:
            outcome = self._runner.execute(convert.plan_from_pb(message), began_at=began_at)
        except InvalidParameter as error:
            self._fail_session(error.message)
            return
        result = convert.outcome_to_pb(outcome, idle_s=idle_s)
        self._pipe.send(Frame(FrameKind.EVENT, self._session, pb.RunSessionResponse(result=result).SerializeToString()))
        self._step_ended_at = time.monotonic()

    def _fail_session(self, message: str) -> None:
        """The scheduler sent nonsense: its session ends, the process goes on."""
        log.warning("session %d ends: %s", self._session, message)
        self._pipe.send(Frame(FrameKind.FAILED, self._session, message.encode()))
        self._end_session()

    def _send_transfer(self, session: int, done: object) -> None:
        """Runs on the transfer thread."""
        from executor_svc import convert

        self._pipe.send(Frame(FrameKind.EVENT, session, convert.transfer_to_pb(done).SerializeToString()))


def main(fd: int) -> int:
    """Serves the front at the other end of fd; returns the exit status."""
    # The front alone decides when the worker ends: a Ctrl-C reaches both, and the front wants the last results.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = FramePipe(socket.socket(fileno=fd))
    frames = pipe.receive(wait=True)
    if frames is None:
        return 0
    settings = ExecutorSettings.model_validate_json(frames[0].payload)
    setup_logging(settings.executor_id, settings.log_level)
    try:
        from executor_svc.engine import build_engine

        engine = build_engine(settings, lambda text: pipe.send(Frame(FrameKind.PROGRESS, payload=text.encode())))
    except StartupError as error:
        pipe.send(Frame(FrameKind.REFUSED, payload=error.message.encode()))
        return 1
    except ConnectionError:
        log.info("the front is gone")
        return 0
    # What start-up made lives as long as the process: the collector need not look at it in the middle of a step.
    gc.collect()
    gc.freeze()
    pipe.send(Frame(FrameKind.READY, payload=engine.info.SerializeToString()))
    StepLoop(pipe, engine).run()
    return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    logging.shutdown()
    # Threads of the store's client and of compute libraries must not hold the end up.
    os._exit(status)
