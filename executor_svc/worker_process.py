"""The front's view of its worker: start it, talk to it, notice its end. Knows the pipe and processes, no gRPC.

One session at a time is current. Opening a session ends the one before with StaleEpoch: the worker drops its sequences
and whatever of it is still on the way is ignored.
"""

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence

from common.cpu_cores import usable_cores
from common.errors import ExecutorLost, InvalidParameter, ModelLoading, OctavoError, SlowConsumer, StaleEpoch, StartupError
from common.frames import Frame, FrameKind, read_frame
from executor_svc.inbox import LINE_MESSAGE
from executor_svc.settings import ExecutorSettings
from octavo.executor.v1 import executor_service_pb2 as pb

log = logging.getLogger(__name__)
WORKER_COMMAND = (sys.executable, "-m", "executor_svc.worker")
MAX_UNREAD_EVENTS = 4096


class WorkerSession:
    """One scheduler's time with the worker."""

    def __init__(self, worker: "WorkerProcess", number: int):
        self._worker = worker
        self.number = number
        self._opened = asyncio.Event()
        self._events: asyncio.Queue[pb.RunSessionResponse] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._error: OctavoError | None = None
        self._ended = False

    async def send(self, command: pb.RunSessionRequest) -> None:
        """Hands a command to the worker, in order; a session that is over sends nothing."""
        if not self._ended:
            await self._worker.send(Frame(FrameKind.COMMAND, self.number, command.SerializeToString()))

    async def events(self) -> AsyncIterator[pb.RunSessionResponse]:
        """The worker's events until the session ends.

        Raises:
            OctavoError: why it ended, unless the scheduler ended it.
        """
        while True:
            while not self._events.empty():
                yield self._events.get_nowait()
            if self._ended:
                break
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def wait_opened(self) -> None:
        """Returns when nothing of an older session moves in the worker any more.

        Raises:
            OctavoError: the session ended before.
        """
        await self._opened.wait()
        if self._error is not None:
            raise self._error

    def hand_over(self, line: socket.socket) -> None:
        """Gives the scheduler's line to the worker; a session that is over gives none."""
        with line:
            if not self._ended:
                self._worker.hand_over(self.number, line)

    def receive(self, frame: Frame) -> None:
        """Takes in what the worker says of this session."""
        match frame.kind:
            case FrameKind.OPENED:
                self._opened.set()
            case FrameKind.EVENT if self._events.qsize() >= MAX_UNREAD_EVENTS:
                self.end(SlowConsumer(f"the scheduler left {MAX_UNREAD_EVENTS} events unread"))
            case FrameKind.EVENT:
                self._events.put_nowait(pb.RunSessionResponse.FromString(frame.payload))
                self._changed.set()
            case FrameKind.FAILED:
                field, _, problem = frame.payload.decode().partition(": ")
                self.end(InvalidParameter(field, problem))
            case _:
                log.warning("unexpected frame %s of session %d", frame.kind.name, self.number)

    def end(self, error: OctavoError | None = None) -> None:
        """Ends the session; the worker drops its sequences. Only the first end counts."""
        if self._ended:
            return
        self._ended, self._error = True, error
        self._opened.set()
        self._changed.set()
        self._worker.close_session(self)


class WorkerProcess:
    """A running worker.

    Attributes:
        ready: done with the ExecutorInfo once the worker serves, or with the StartupError that it refused with.
        died: set once the worker is gone, whatever the reason.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        lines: socket.socket,
    ):
        self._process = process
        self._lines = lines
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._session: WorkerSession | None = None
        self._stopping = False
        self._info = pb.ExecutorInfo()
        self.ready: asyncio.Future[pb.ExecutorInfo] = asyncio.get_running_loop().create_future()
        self.died = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, settings: ExecutorSettings, command: Sequence[str] = WORKER_COMMAND) -> "WorkerProcess":
        """Starts the process. Call it before anything of gRPC is made: gRPC and fork do not go together.

        Args:
            settings: handed to the worker.
            command: to run; the descriptors of the pipe and of the socket for lines are added.
        """
        ours, theirs = socket.socketpair()
        lines, their_lines = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        lines.setblocking(False)
        descriptors = [theirs.fileno(), their_lines.fileno()]
        process = await asyncio.create_subprocess_exec(
            *command,
            *map(str, descriptors),
            pass_fds=descriptors,
            env=worker_environment(settings),
        )
        theirs.close()
        their_lines.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 22)
        worker = cls(process, reader, writer, lines)
        await worker.send(Frame(FrameKind.SETTINGS, payload=settings.to_json()))
        return worker

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    @property
    def in_session(self) -> bool:
        """Whether a session is open."""
        return self._session is not None

    def info(self) -> pb.ExecutorInfo:
        """What the worker serves.

        Raises:
            ModelLoading: it is not ready yet.
            ExecutorLost: it is gone.
        """
        if self.died.is_set():
            raise ExecutorLost("the executor's worker process is gone")
        if not self.ready.done():
            raise ModelLoading("the executor is loading its model", retry_after_s=1.0)
        return self._info

    async def open_session(self) -> WorkerSession:
        """Makes a new session the current one; the session before ends with StaleEpoch."""
        self.info()
        if self._session is not None:
            self._session.end(StaleEpoch("a newer session took this executor over"))
        session = self._session = WorkerSession(self, next(self._numbers))
        await self.send(Frame(FrameKind.OPEN, session.number))
        return session

    def close_session(self, session: WorkerSession) -> None:
        """Tells the worker to drop the session's sequences."""
        if self._session is session:
            self._session = None
        if not self._writer.is_closing():
            self._writer.write(Frame(FrameKind.CLOSE, session.number).encode())

    async def send(self, frame: Frame) -> None:
        """Writes a frame; a worker that is gone is noticed elsewhere."""
        if self._writer.is_closing():
            return
        self._writer.write(frame.encode())
        try:
            await self._writer.drain()
        except ConnectionError:
            log.debug("frame %s was not read by the worker", frame.kind.name)

    def hand_over(self, session: int, line: socket.socket) -> None:
        """Gives the worker a copy of the socket by which the session's scheduler reaches it."""
        try:
            socket.send_fds(self._lines, [LINE_MESSAGE.pack(session)], [line.fileno()])
        except OSError as error:  # the worker is gone, or takes nothing: the scheduler goes on without a line
            log.warning("session %d gets no line: %s", session, error)

    async def stop(self, timeout_s: float) -> None:
        """Ends the worker: after its running step and the saves that wait, but at once while it loads or after timeout_s."""
        self._stopping = True
        self._writer.close()
        self._lines.close()
        if not self.ready.done() and self._process.returncode is None:
            self._process.kill()
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            log.warning("the worker's step or saves outlast the %.1f s that they have; killing it", timeout_s)
            self._process.kill()
            await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        while (frame := await read_frame(self._reader)) is not None:
            self._receive(frame)
        status = await self._process.wait()
        if not self._stopping:
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            if status == -signal.SIGKILL:
                how += " (the system kills processes when it runs out of memory)"
            log.error("the worker process %d is gone: %s", self.pid, how)
            if not self.ready.done():
                self.ready.set_exception(StartupError(f"the worker process ended while it was loading the model: {how}"))
        self.died.set()
        if self._session is not None:
            self._session.end(ExecutorLost("the executor's worker process is gone"))

    def _receive(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.PROGRESS:
                log.info("%s", frame.payload.decode())
            case FrameKind.READY:
                self._info = pb.ExecutorInfo.FromString(frame.payload)
                if not self.ready.done():
                    self.ready.set_result(self._info)
            case FrameKind.REFUSED:
                self.ready.set_exception(StartupError(frame.payload.decode()))
            case _ if self._session is not None and frame.session == self._session.number:
                self._session.receive(frame)


def worker_environment(settings: ExecutorSettings) -> dict[str, str]:
    """The environment to compute in: the libraries read it when they are loaded, so it is set from outside the process."""
    threads = str(settings.num_threads or usable_cores())
    defaults = {
        # Activations come from the heap again and again instead of from fresh pages of the system.
        "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
        # A waiting thread spins for about 0.5 ms, longer than the gap between two kernels of a step and than most of what the
        # front, the scheduler and its clients take a core for, then sleeps: sleeping at once costs a fifth of a decode step.
        "GOMP_SPINCOUNT": "100000",
        # Nothing is ever asked of a hub while a model is served.
        "USE_HUB_KERNELS": "NO",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**defaults, **os.environ, "OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
