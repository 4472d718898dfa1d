"""The edge processes of a server: started, joined to the engine by a line each, started again when one dies, ended together.

Knows processes and lines; does not know what is served. A process that dies takes its own requests with it and nobody else's.
"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from common.degraded import DegradedPaths
from common.errors import StartupError
from common.frames import Frame, FrameKind
from scheduler_svc.edge.engine import Administration
from scheduler_svc.edge_line.session import EdgeSession
from scheduler_svc.edge_line.stream import FrameStream, open_stream
from scheduler_svc.engine import Engine
from scheduler_svc.settings import SchedulerSettings

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_END_TIMEOUT_S = 5.0
_LOST_TIMEOUT_S = 2.0
"""A process whose line has ended: until it is gone, the kernel gives it connections."""


class RunningEdge(Protocol):
    """Something that runs at the other end of a line."""

    async def wait(self) -> int:
        """Returns its exit status, negative for a signal, once it has ended."""
        ...

    def kill(self) -> None:
        """Ends it at once. One that has ended is fine."""
        ...


Launch = Callable[[str, socket.socket], Awaitable[RunningEdge]]
"""Starts an edge of a name at the other end of a line; the socket is closed here afterwards."""


class _Process:
    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


async def launch_process(name: str, connection: socket.socket) -> RunningEdge:
    """Starts a process.

    gRPC and fork do not go together, and the engine's process has channels: here the child runs no line of Python and no handler
    of a library between vfork and exec.
    """
    descriptor = connection.fileno()
    level = logging.getLevelName(logging.getLogger().level)
    command = (sys.executable, "-m", "scheduler_svc.edge_process", str(descriptor), name, level)
    return _Process(await asyncio.create_subprocess_exec(*command, pass_fds=[descriptor]))


class _Edge:
    """One edge from its start to its end.

    Attributes:
        ready: done when it serves, or does not; the result is why it does not, empty if it does.
        lost: set when its line has ended.
    """

    def __init__(self, name: str, running: RunningEdge, stream: FrameStream, session: EdgeSession):
        self.name = name
        self.session = session
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.lost = asyncio.Event()
        self._running = running
        self._stream = stream
        stream.on_frame = self._receive
        stream.on_lost = self.lost.set

    def say(self, frame: Frame) -> None:
        self._stream.send(frame)

    async def end(self, timeout_s: float) -> int:
        """Waits for its end, but not longer than that."""
        try:
            return await asyncio.wait_for(self._running.wait(), timeout_s)
        except TimeoutError:
            log.warning("%s does not end; killing it", self.name)
            self._running.kill()
            return await self._running.wait()
        finally:
            self._stream.abort()
            self.session.end()

    def _receive(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.COMMAND:
                self.session.receive(frame)
            case FrameKind.READY:
                self.ready.set_result("")
            case FrameKind.REFUSED:
                self.ready.set_result(frame.payload.decode())


class EdgeProcesses:
    """See the module's first lines.

    Args:
        settings: for them; listen is an address that they share.
        num_processes: how many.
        launch: starts one.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        num_processes: int,
        engine: Engine,
        administration: Administration,
        degraded: DegradedPaths,
        launch: Launch = launch_process,
    ):
        self._settings = settings
        self._names = [f"edge-{index}" for index in range(num_processes)]
        self._engine = engine
        self._administration = administration
        self._degraded = degraded
        self._launch = launch
        self._edges: dict[str, _Edge] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = False

    @property
    def sessions(self) -> dict[str, EdgeSession]:
        """Of the edges that run, by name."""
        return {name: edge.session for name, edge in self._edges.items()}

    async def start(self) -> None:
        """Starts all and waits until each serves.

        Raises:
            StartupError: one cannot.
        """
        edges = await asyncio.gather(*(self._open(name) for name in self._names))
        for edge in edges:
            await self._until_ready(edge)
        self._tasks = [asyncio.create_task(self._keep(edge), name=edge.name) for edge in edges]

    def drain(self) -> None:
        """Health says NOT_SERVING at every edge."""
        self._is_draining = True
        for edge in self._edges.values():
            edge.session.drain()

    async def stop(self) -> None:
        """Ends all. The engine's requests have ended before; what is said of that is delivered first."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for edge in self._edges.values():
            edge.session.flush()
            edge.say(Frame(FrameKind.CLOSE))
        await asyncio.gather(*(edge.end(_END_TIMEOUT_S) for edge in self._edges.values()))
        self._edges.clear()

    async def _open(self, name: str) -> _Edge:
        ours, theirs = socket.socketpair()
        with theirs:
            running = await self._launch(name, theirs)
        stream = await open_stream(ours, FrameStream())
        session = EdgeSession(self._engine, self._administration, stream, name)
        edge = self._edges[name] = _Edge(name, running, stream, session)
        edge.say(Frame(FrameKind.SETTINGS, payload=self._settings.to_json()))
        if self._is_draining:
            session.drain()
        return edge

    async def _until_ready(self, edge: _Edge) -> None:
        lost = asyncio.ensure_future(edge.lost.wait())
        first: list[asyncio.Future[Any]] = [lost, edge.ready]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not edge.ready.done():
                raise StartupError(f"{edge.name} ended at its start ({_how(await edge.end(_END_TIMEOUT_S))})")
            if reason := edge.ready.result():
                raise StartupError(reason)
        finally:
            lost.cancel()

    async def _keep(self, edge: _Edge) -> None:
        """Starts an edge again whenever it is gone."""
        loop, backoff_s = asyncio.get_running_loop(), _FIRST_BACKOFF_S
        while True:
            began_at_s = loop.time()
            await edge.lost.wait()
            if loop.time() - began_at_s > _MAX_BACKOFF_S:
                backoff_s = _FIRST_BACKOFF_S
            edge.session.end()
            how = _how(await edge.end(_LOST_TIMEOUT_S))
            self._degraded.note("edge_lost", f"{edge.name} is gone ({how}) and is started again")
            while True:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                try:
                    edge = await self._open(edge.name)
                    await self._until_ready(edge)
                    break
                except (StartupError, OSError) as error:
                    log.error("%s cannot start: %s", edge.name, error)
                    await edge.end(_END_TIMEOUT_S)
            self._degraded.clear("edge_lost")
            log.info("%s serves again", edge.name)


def _how(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
