"""Requests that wait while blocks of them come from the store: what could be loaded for them, and what is.

Knows requests, those that wait, and a session's blocks. Does not know the store, or whether a load pays.
"""

from common.ids import BlockKey, RequestId
from scheduler_svc.core.plan import LoadPlan
from scheduler_svc.core.request_state import RequestState
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.session import Session
from scheduler_svc.core.transfers import Transfers
from scheduler_svc.core.waiting_queue import WaitingQueue


class PrefixLoads:
    """See the module's first lines.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, requests: RequestTable, waiting: WaitingQueue, transfers: Transfers, block_size: int):
        self._requests = requests
        self._waiting = waiting
        self._transfers = transfers
        self._block_size = block_size
        self._loading: dict[int, RequestState] = {}

    def missing_keys(self, session: Session, request_id: RequestId) -> tuple[BlockKey, ...]:
        """See Scheduler.missing_keys."""
        state = self._requests.get(request_id)
        if state is None or not state.waits_whole or state.load_id is not None:
            return ()
        keys = state.waiting_keys
        num_present = len(session.pool.index.match(keys))
        if num_present < len(keys) and session.pool.index.is_promised(keys[num_present]):
            return ()
        return tuple(keys[num_present:])

    def begin(self, session: Session, request_id: RequestId, num_blocks: int) -> LoadPlan | None:
        """See Scheduler.begin_load."""
        keys = self.missing_keys(session, request_id)[:num_blocks]
        if not keys:
            return None
        state = self._requests.get(request_id)
        assert state is not None, f"request {request_id} has keys"
        pool = session.pool
        prefix = pool.index.match(state.waiting_keys)
        if not session.running.can_take(len(keys) + pool.num_cached_of(prefix)):
            return None
        plan = self._transfers.begin_load(prefix, keys, session.outstanding.applied_step_id)
        if plan is not None:
            state.load_id = plan.load_id
            self._loading[plan.load_id] = state
            self._waiting.hold(state.sequences)
        return plan

    def end(self, load_id: int, num_loaded: int, num_by_tier: dict[str, int]) -> None:
        """See Scheduler.end_load."""
        self._transfers.end_load(load_id, num_loaded)
        state = self._loading.pop(load_id, None)
        if state is not None:
            state.load_id = None
            self._waiting.release(state.sequences)
            state.has_loaded = True
            state.loaded_by_tier = {tier: num * self._block_size for tier, num in num_by_tier.items() if num}

    def give_up(self) -> None:
        """The session is over: nobody waits any more."""
        for state in self._loading.values():
            state.load_id = None
            self._waiting.release(state.sequences)
        self._loading.clear()
