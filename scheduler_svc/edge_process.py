"""A process of the public edge: python -m scheduler_svc.edge_process DESCRIPTOR NAME LOG_LEVEL. Puts its parts together.

The engine's process starts it and is its only user, by the socket of that descriptor: settings come first, the end of the
socket is its end. Everything of a request that is not the engine's business happens here.
"""

import asyncio
import logging
import signal
import socket
import sys
import time

from common.clock import Clock, MonotonicClock
from common.cpu_cores import usable_cores
from common.errors import StartupError
from common.frames import Frame, FrameKind
from common.logs import setup_logging
from common.rpc.address import Address
from common.rpc.server import RpcServer
from octavo.scheduler.v1 import edge_line_pb2 as pb
from scheduler_svc.edge.pacing import MESSAGES_PER_CORE_BESIDE_S, Pacing
from scheduler_svc.edge_line.remote_engine import EngineCalls, RemoteAdministration, RemoteEngine
from scheduler_svc.edge_line.stream import FrameStream, open_stream
from scheduler_svc.public_server import public_server
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.text.model_text import ModelText

log = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 1.0


class Edge:
    """What the engine's process says to an edge, taken apart: what to be, news, the end.

    Attributes:
        settings: what to be; None: the engine's process was gone before.
        is_over: True: the engine's process says so; False: it is gone.
        draining: new requests are refused.
    """

    def __init__(self, stream: FrameStream, clock: Clock):
        loop = asyncio.get_running_loop()
        self.settings: asyncio.Future[SchedulerSettings | None] = loop.create_future()
        self.is_over: asyncio.Future[bool] = loop.create_future()
        self.draining = asyncio.Event()
        self.calls = EngineCalls(stream)
        self.engine = RemoteEngine(self.calls, clock, on_draining=self.draining.set)
        stream.on_frame = self._receive
        stream.on_lost = lambda: self._end(False)

    def _receive(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.SETTINGS:
                self.settings.set_result(SchedulerSettings.from_json(frame.payload))
            case FrameKind.EVENT:
                self.engine.receive(frame)
            case FrameKind.CLOSE:
                self._end(True)

    def _end(self, was_asked: bool) -> None:
        if not self.settings.done():
            self.settings.set_result(None)
        if not self.is_over.done():
            self.is_over.set_result(was_asked)


async def serve_edge(connection: socket.socket) -> bool:
    """Serves the public API until the engine says that it is over, or is gone.

    Args:
        connection: the line to the engine.

    Returns:
        Whether it ended because the engine said so.
    """
    stream, clock = FrameStream(), MonotonicClock()
    edge = Edge(stream, clock)
    await open_stream(connection, stream)
    try:
        settings = await edge.settings
        if settings is None:
            return False
        edge.engine.hashes_prompts = settings.prefix_caching
        text = ModelText.load(settings.model, settings.model_name or None)
        is_shared = Address.parse(settings.listen).socket_path is None
        pacing = Pacing(usable_cores(), MESSAGES_PER_CORE_BESIDE_S)
        administration = RemoteAdministration(edge.calls)
        server = public_server(settings, text, edge.engine, administration, clock, pacing, shares_port=is_shared)
        await server.start()
        stream.send(Frame(FrameKind.READY))
        return await _serve(edge, server, text)
    except StartupError as error:
        stream.send(Frame(FrameKind.REFUSED, payload=error.message.encode()))
        return False
    finally:
        stream.close()


async def _serve(edge: Edge, server: RpcServer, text: ModelText) -> bool:
    async def follow_health() -> None:
        await edge.draining.wait()
        await server.set_serving(False)

    async def report() -> None:
        while True:
            edge.calls.tell(pb.EdgeCommand(report=pb.EdgeReport(cpu_s=time.process_time())))
            await asyncio.sleep(_REPORT_INTERVAL_S)

    tasks = [asyncio.create_task(follow_health()), asyncio.create_task(report())]
    try:
        was_asked = await edge.is_over
    finally:
        for task in tasks:
            task.cancel()
        edge.engine.end()
        await server.stop(0.5)  # ended requests get to tell their callers
        text.close()
    if not was_asked:
        log.error("the engine's process is gone")
    return was_asked


def main(descriptor: int, name: str, log_level: str) -> int:
    """Runs until the engine ends it; returns the exit status."""
    # The engine alone decides when an edge ends: a signal to all processes of the group must not cut running streams.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setup_logging(name, log_level)
    return 0 if asyncio.run(serve_edge(socket.socket(fileno=descriptor))) else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
