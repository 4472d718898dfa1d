"""The two ways to serve the public API: from the engine's process, and from processes of its own. Knows how each is put together.

Both are started, drained and stopped alike; see PublicEdge in app.py.
"""

import logging

from common.clock import Clock
from common.cpu_cores import usable_cores
from common.degraded import DegradedPaths
from common.rpc.address import Address
from common.rpc.shared_port import SharedPort
from scheduler_svc.edge.engine import Administration
from scheduler_svc.edge.pacing import Pacing
from scheduler_svc.edge_line.processes import EdgeProcesses, Launch
from scheduler_svc.engine import Engine
from scheduler_svc.public_server import public_server
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.text.model_text import ModelText

log = logging.getLogger(__name__)


class OwnEdge:
    """Serves from this process, where the engine runs."""

    def __init__(self, settings: SchedulerSettings, engine: Engine, administration: Administration, clock: Clock):
        self._text = ModelText.load(settings.model, settings.model_name or None)
        self._server = public_server(settings, self._text, engine, administration, clock, Pacing(usable_cores()))

    @property
    def address(self) -> Address:
        """See PublicEdge."""
        return self._server.address

    async def start(self) -> None:
        """See PublicEdge."""
        await self._server.start()

    async def drain(self) -> None:
        """See PublicEdge."""
        await self._server.set_serving(False)

    async def stop(self) -> None:
        """See PublicEdge."""
        await self._server.stop(0.5)  # ended requests get to tell their callers
        self._text.close()


class SeparateEdge:
    """Serves from processes of its own, which share the address. They cannot share a unix socket: there it is one process.

    Args:
        num_processes: how many.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        num_processes: int,
        engine: Engine,
        administration: Administration,
        degraded: DegradedPaths,
        launch: Launch,
    ):
        address = Address.parse(settings.listen)
        self._port = SharedPort.reserve(address) if address.socket_path is None else None
        self.address = address if self._port is None else self._port.address
        if self._port is None and num_processes > 1:
            log.info("processes cannot share a unix socket: 1 edge process instead of %d", num_processes)
            num_processes = 1
        settings = settings.model_copy(update={"listen": self.address.target})
        self.processes = EdgeProcesses(settings, num_processes, engine, administration, degraded, launch)

    async def start(self) -> None:
        """See PublicEdge."""
        await self.processes.start()

    async def drain(self) -> None:
        """See PublicEdge."""
        self.processes.drain()

    async def stop(self) -> None:
        """See PublicEdge."""
        await self.processes.stop()
        if self._port is not None:
            self._port.close()
