"""The engine as the edge sees it. Knows requests and what becomes of them; not where the engine runs.

Two things are like this: the engine itself, for an edge in its process (scheduler_svc/engine.py), and the remote engine at the
end of a socket, for an edge in a process of its own (scheduler_svc/edge_line).
"""

from typing import Protocol

from common.ids import RequestId
from octavo.executor.v1 import executor_service_pb2 as executor_pb
from octavo.scheduler.v1 import admin_service_pb2 as admin_pb
from scheduler_svc.core.request import Request
from scheduler_svc.generation import Generation, Output


class EdgeEngine(Protocol):
    """What InferenceService and ModelService ask for."""

    @property
    def model(self) -> executor_pb.ExecutorInfo | None:
        """What is served; None before the first executor is connected."""
        ...

    @property
    def num_open_requests(self) -> int:
        """Requests of the whole server that have not ended."""
        ...

    async def served_model(self) -> executor_pb.ExecutorInfo:
        """What is served; may wait a moment for an executor.

        Raises:
            Unavailable: nothing is, with the reason.
        """
        ...

    async def num_connected_executors(self) -> int:
        """Executors with an open session."""
        ...

    async def submit(self, request: Request, output: Output) -> Generation:
        """Takes a request; its output is pushed from now on.

        Raises:
            DuplicateRequest, Unavailable, QueueFull, KvPoolTooSmall.
        """
        ...

    def abandon(self, generation: Generation) -> None:
        """Ends a request that nobody wants any more. One that has ended is fine."""
        ...

    async def cancel_generation(self, request_id: RequestId) -> bool:
        """Ends a request by its id, whichever connection and process it came by.

        Returns:
            False: no such request.
        """
        ...


class Administration(Protocol):
    """What AdminService asks for."""

    async def server_info(self) -> admin_pb.GetServerInfoResponse:
        """Versions, limits and peers."""
        ...

    async def load(self) -> admin_pb.GetLoadResponse:
        """Load of now."""
        ...

    async def flush_cache(self, *, include_store: bool) -> admin_pb.FlushCacheResponse:
        """Forgets cached prefixes that no request uses."""
        ...

    async def add_executor(self, address: str) -> admin_pb.AddExecutorResponse:
        """An executor joins.

        Raises:
            InvalidParameter: it is here already, or that is no address.
        """
        ...

    async def remove_executor(self, address: str, drain_s: float) -> admin_pb.RemoveExecutorResponse:
        """An executor leaves; its running requests get drain_s seconds.

        Raises:
            InvalidParameter: it is not here.
        """
        ...
