"""Processes that look like the services from outside: health, the public API, and ways to misbehave.

    python -m tests.unit.octavo.cli.fake_service NAME --listen ADDRESS ... [refuse|deaf|mute]

refuse: ends at its start with a reason. deaf: ignores SIGTERM. mute: never serves. FAKE_BEHAVIOUR in the environment, for
example "scheduler=refuse", does the same where the command line is not the test's.
"""

import asyncio
import logging
import os
import signal
import sys

from common.logs import setup_logging
from common.rpc.address import Address
from common.rpc.security import ServerSecurity
from common.rpc.server import RpcServer
from tests.unit.octavo.fake_scheduler import FakeScheduler, start

log = logging.getLogger("fake")


async def serve(name: str, listen: str, behaviour: str) -> None:
    if behaviour == "deaf":
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: log.info("not listening"))
        log.info("deaf from now on")
        await asyncio.Event().wait()
    if name == "scheduler":
        num_executors = sys.argv.count("--executors")
        server = await start(FakeScheduler(num_executors), listen)
    else:
        server = RpcServer(Address.parse(listen), ServerSecurity(), ["fake"])
        await server.start()
    if behaviour == "mute":
        await server.set_serving(False)
    log.info("serving on %s", listen)
    await server.wait_for_stop()
    await server.stop(0)
    log.info("bye")


def main(name: str) -> None:
    setup_logging(name)
    behaviours = dict(entry.split("=") for entry in os.environ.get("FAKE_BEHAVIOUR", "").split(",") if entry)
    behaviour = behaviours.get(name, sys.argv[-1])
    if behaviour == "refuse":
        log.error("cannot start: no room for %s", name)
        sys.exit(1)
    asyncio.run(serve(name, sys.argv[sys.argv.index("--listen") + 1], behaviour))


if __name__ == "__main__":
    main(sys.argv[1])
