"""A whole server for the length of a with block: model prepared, processes started, folder removed. Used by up and demo."""

import asyncio
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from common.errors import StartupError
from common.rpc.address import Address
from common.rpc.security import ServerSecurity
from octavo.cli.child import LineSink
from octavo.cli.services import Service, StackOptions, services
from octavo.cli.stack import ProgressSink, Stack, run_to_end
from octavo.client import AsyncOctavoClient

PREPARE_MODULE = "executor_svc.model.prepare"


@asynccontextmanager
async def running_server(options: StackOptions, on_line: LineSink, on_progress: ProgressSink) -> AsyncIterator[tuple[Stack, str]]:
    """A server that serves.

    Yields:
        Its processes, and the address of its public API.

    Raises:
        StartupError: it cannot start; the message says why.
    """
    if options.listen is not None:
        check_listen(Address.parse(options.listen), options)
    services(options, Path(), Path("/"), 1)  # what is wrong with the options is said before the model is prepared
    folder = await _prepare(options, on_line, on_progress)
    runtime = Path(tempfile.mkdtemp(prefix="octavo-"))
    try:
        found = services(options, folder, runtime, len(os.sched_getaffinity(0)))
        stack = Stack(found, on_line, on_progress)
        on_progress(f"starting {', '.join(service.name for service in found)}")
        try:
            await stack.start()
            await stack.wait_for("scheduler", _executors_connected(found[-1], options))
            yield stack, found[-1].address.target
        finally:
            await stack.stop()
    finally:
        shutil.rmtree(runtime, ignore_errors=True)


def run_until_stopped(work: Coroutine[Any, Any, None]) -> bool:
    """Runs work; Ctrl-C, SIGTERM and SIGHUP cancel it, a second one also its cleaning up.

    Returns:
        False: it was stopped by a signal.
    """

    async def main() -> bool:
        task = asyncio.ensure_future(work)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            return False
        return True

    return asyncio.run(main())


def check_listen(address: Address, options: StackOptions) -> None:
    """Looks for what would stop the scheduler at its start, before the model is prepared.

    Raises:
        StartupError: the address is in use, or open to other hosts without protection.
    """
    ServerSecurity(options.tls_cert, options.tls_key, None, options.token, insecure=options.insecure).check_listen(address)
    if address.socket_path is not None:
        return
    host, _, port = address.target.rpartition(":")
    try:
        family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise StartupError(
            f"cannot listen on {address.target}: {error.strerror}; stop the other server, or choose an address with --listen"
        ) from error


async def _prepare(options: StackOptions, on_line: LineSink, on_progress: ProgressSink) -> Path:
    """The folder of the model, converted or downloaded if need be."""
    if options.load_format == "random":
        return Path(options.model)  # a folder with a configuration is all that it takes
    on_progress(f"preparing the model {options.model}")
    arguments = ("-m", PREPARE_MODULE, options.model)
    return Path(await run_to_end("prepare", arguments, on_line, environment={"TQDM_DISABLE": "1"}))


async def _executors_connected(scheduler: Service, options: StackOptions) -> None:
    """Returns when the scheduler holds a session with every executor."""
    if scheduler.is_secure:
        return  # its certificate's name is not ours to guess; the scheduler connects within a second
    async with AsyncOctavoClient(scheduler.address.target, token=options.token, timeout_s=10.0) as client:
        async for load in client.watch_load(0.1):
            if sum(executor.connected for executor in load.executors) == options.num_executors:
                return
