"""Wiring of one executor: worker, gRPC front, health, and their end. Knows everything here, decides nothing elsewhere."""

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Any

from common.rpc.address import Address
from common.rpc.server import RpcServer
from executor_svc.service import ExecutorServicer
from executor_svc.settings import ExecutorSettings
from executor_svc.worker_process import WorkerProcess
from octavo.executor.v1 import executor_service_pb2, executor_service_pb2_grpc

log = logging.getLogger(__name__)
SERVICE = executor_service_pb2.DESCRIPTOR.services_by_name["ExecutorService"].full_name
# One plan may carry 256 new prompts of 8,192 tokens.
MAX_MESSAGE_BYTES = 64 << 20


async def serve(settings: ExecutorSettings) -> int:
    """Runs the executor until SIGTERM or SIGINT (returns 0) or until its worker dies (returns 1).

    Raises:
        StartupError: the address cannot be bound or the model cannot be served.
    """
    address = Address.parse(settings.listen)
    security = settings.security()
    security.check_listen(address)
    worker = await WorkerProcess.start(settings)  # before anything of gRPC exists
    try:
        server = RpcServer(address, security, [SERVICE], max_message_bytes=MAX_MESSAGE_BYTES)
        servicer = ExecutorServicer(worker, settings.line_folder)
        executor_service_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server.grpc)
        await server.start(serving=False)
    except BaseException:
        await worker.stop(0.0)
        raise
    stop = asyncio.create_task(server.wait_for_stop())
    died = asyncio.create_task(worker.died.wait())
    try:
        await _first(worker.ready, stop, died)
        if worker.ready.done():
            info = worker.ready.result()
            await server.set_serving(True)
            log.info("serving %s on %s", info.model, server.address.target)
            await _first(stop, died)
    finally:
        ends_at = time.monotonic() + settings.grace_s
        servicer.drain()
        await server.stop(settings.grace_s)
        lost = worker.died.is_set()
        await worker.stop(max(0.0, ends_at - time.monotonic()) + settings.save_drain_s)
        stop.cancel()
        died.cancel()
    if lost:
        log.error("the executor ends because its worker process is gone")
    return 1 if lost else 0


async def _first(*waiting: "Awaitable[Any]") -> None:
    """Returns when one of them is done, whatever became of it."""
    await asyncio.wait([asyncio.ensure_future(item) for item in waiting], return_when=asyncio.FIRST_COMPLETED)
