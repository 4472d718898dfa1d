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

from common.clock import MonotonicClock
from common.cpu_cores import usable_cores
from common.errors import StartupError
from common.frames import Frame, FrameKind
from common.logs import setup_logging
from common.rpc.address import Address
from octavo.scheduler.v1 import edge_line_pb2 as pb
from scheduler_svc.edge.pacing import MESSAGES_PER_CORE_BESIDE_S, Pacing
from scheduler_svc.edge_line.remote_engine import EngineCalls, RemoteAdministration, RemoteEngine
from scheduler_svc.edge_line.stream import FrameStream, open_stream
from scheduler_svc.public_server import public_server
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.text.model_text import ModelText

log = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 1.0


async def serve_edge(connection: socket.socket) -> bool:
    """Serves the public API until the engine says that it is over, or is gone.

    Args:
        connection: the line to the engine.

    Returns:
        Whether it ended because the engine said so.
    """
    stream = FrameStream()
    frames: asyncio.Queue[Frame | None] = asyncio.Queue()
    stream.on_frame = frames.put_nowait
    stream.on_lost = lambda: frames.put_nowait(None)
    await open_stream(connection, stream)
    try:
        first = await frames.get()
        return first is not None and await _serve(SchedulerSettings.from_json(first.payload), stream, frames)
    finally:
        stream.close()


async def _serve(settings: SchedulerSettings, stream: FrameStream, frames: "asyncio.Queue[Frame | None]") -> bool:
    draining = asyncio.Event()
    clock = MonotonicClock()
    calls = EngineCalls(stream)
    engine = RemoteEngine(calls, clock, hashes_prompts=settings.prefix_caching, on_draining=draining.set)

    def receive(frame: Frame) -> None:
        if frame.kind is FrameKind.EVENT:
            engine.receive(frame)
        else:
            frames.put_nowait(frame)

    while not frames.empty() and (frame := frames.get_nowait()) is not None:
        receive(frame)
    stream.on_frame = receive
    try:
        text = ModelText.load(settings.model, settings.model_name or None)
        is_shared = Address.parse(settings.listen).socket_path is None
        pacing = Pacing(usable_cores(), MESSAGES_PER_CORE_BESIDE_S)
        server = public_server(settings, text, engine, RemoteAdministration(calls), clock, pacing, shares_port=is_shared)
        await server.start()
    except StartupError as error:
        stream.send(Frame(FrameKind.REFUSED, payload=error.message.encode()))
        return False
    stream.send(Frame(FrameKind.READY))

    async def stop_serving() -> None:
        await draining.wait()
        await server.set_serving(False)

    async def report() -> None:
        while True:
            calls.tell(pb.EdgeCommand(report=pb.EdgeReport(cpu_s=time.process_time())))
            await asyncio.sleep(_REPORT_INTERVAL_S)

    tasks = [asyncio.create_task(stop_serving()), asyncio.create_task(report())]
    try:
        is_over = await frames.get() is not None
    finally:
        for task in tasks:
            task.cancel()
        engine.end()
        await server.stop(0.5)  # ended requests get to tell their callers
        text.close()
    if not is_over:
        log.error("the engine's process is gone")
    return is_over


def main(descriptor: int, name: str, log_level: str) -> int:
    """Runs until the engine ends it; returns the exit status."""
    # The engine alone decides when an edge ends: a signal to all processes of the group must not cut running streams.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setup_logging(name, log_level)
    return 0 if asyncio.run(serve_edge(socket.socket(fileno=descriptor))) else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
