"""One sample of a request: its tokens, how far they are planned and applied, and its blocks. Bookkeeping without policy.

    WAITING ── admit ──> RUNNING ── end ──> FINISHED
       ^ └──────────────────┼── cancel ───────^
       └──── preempt ───────┘

Token positions, from the left:

    |<------------------- token_ids ------------------->|<- num_in_flight_tokens ->|   known (the right part to the executor only)
    |<---- num_applied ---->|
    |<------- num_planned (in a block, or will be by a step that was planned) ---->|   at most known
"""

import enum
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from common.block_hash import chain_keys
from common.ids import BlockId, BlockKey, SeqId
from scheduler_svc.core.account import Account
from scheduler_svc.core.block_table import BlockTable
from scheduler_svc.core.plan import Chunk, NewSequence, SequenceUpdate
from scheduler_svc.core.request import FinishReason, Request


class PlannedChunk(NamedTuple):
    """A chunk in flight.

    Attributes:
        attempt: of the sequence when the step was planned; if it has moved on, the result is void.
        is_sampling: whether the chunk reached the end of the known tokens.
    """

    sequence: "Sequence"
    attempt: int
    num_tokens: int
    is_sampling: bool


class SequenceStatus(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """See the module's first lines.

    Attributes:
        order: place in the queue: arrival number of the request, index.
        token_ids: prompt and output that the scheduler knows.
        keys: of the full blocks of token_ids; always empty unless is_keyed.
        is_keyed: whether its blocks can be found again.
        max_known_tokens: prompt and max_tokens; no step is planned beyond.
        num_planned_tokens, num_applied_tokens, num_in_flight_tokens: see the drawing.
        num_in_flight_steps: unapplied steps with a chunk of this sequence.
        num_listed: leading blocks that were handed to the prefix index, by this sequence or by the one they came from.
        num_offered: leading blocks that were offered to the store, likewise.
        attempt: counts how often steps in flight were declared void.
        is_protected: was preempted and has not got a token since: it may not be preempted again.
        awaited_key: while waiting: the promised key that it waits for.
        account: of whoever pays for it; the policy sets it.
        tier: how safe its place is while it runs, for the policy: room is taken from higher first. Fixed while it runs.
        claim: at its admission room may be taken from tiers above this; at least its tier.
        was_admitted: had a place in the batch, here or elsewhere; its prompt is paid for.
        num_preemptions: how often it lost its place to others.
        decode, planned_decode: a chunk of one token of it without a new block, as the plan has it and as it is in flight.
    """

    seq_id: SeqId
    request: Request
    index: int
    order: tuple[int, int]
    token_ids: list[int]
    keys: list[BlockKey]
    is_keyed: bool
    table: BlockTable
    max_known_tokens: int
    status: SequenceStatus = SequenceStatus.WAITING
    num_planned_tokens: int = 0
    num_applied_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_in_flight_steps: int = 0
    num_listed: int = 0
    num_offered: int = 0
    attempt: int = 0
    is_protected: bool = False
    awaited_key: BlockKey | None = None
    account: Account = field(default_factory=Account)
    tier: int = field(init=False)
    claim: int = field(init=False)
    was_admitted: bool = False
    num_preemptions: int = 0
    stop_token_ids: frozenset[int] = field(init=False)
    decode: Chunk = field(init=False)
    planned_decode: PlannedChunk = field(init=False)

    def __post_init__(self) -> None:
        self.stop_token_ids = self.request.stop.stop_token_ids
        self.decode = Chunk(self.seq_id, 1)
        self.planned_decode = PlannedChunk(self, self.attempt, 1, True)
        self.tier = self.claim = self.request.service_class
        self.was_admitted = bool(self.request.generated)

    @property
    def rank(self) -> tuple[int, tuple[int, int]]:
        """Its place among those that run: who is behind may have to make room for who is ahead. Fixed while it runs."""
        return self.tier, self.order

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Tokens that the executor knows when all planned steps are done."""
        return len(self.token_ids) + self.num_in_flight_tokens

    def append(self, token_id: int) -> FinishReason | None:
        """Takes a token that the executor drew, and says whether it is the last.

        Stop ids need no look at min_tokens: the executor does not draw them before.
        """
        self.token_ids.append(token_id)
        if self.is_keyed and len(self.token_ids) % self.table.block_size == 0:
            self._extend_keys()
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_known_tokens:
            return FinishReason.LENGTH
        return None

    def become_running(self, block_ids: list[BlockId], num_shared: int, num_tokens: int) -> None:
        """It has its blocks; the first num_shared are listed by others, the first num_tokens tokens need not be computed."""
        self.status = SequenceStatus.RUNNING
        self.table.block_ids = block_ids
        self.num_planned_tokens = self.num_applied_tokens = num_tokens
        self.num_listed = self.num_offered = num_shared
        self.awaited_key = None

    def become_waiting(self) -> None:
        """It has lost its blocks."""
        self.status = SequenceStatus.WAITING
        self.num_planned_tokens = self.num_applied_tokens = 0
        self.num_listed = self.num_offered = 0

    def void_steps(self) -> None:
        """Results of steps in flight will not count."""
        self.attempt += 1
        self.planned_decode = PlannedChunk(self, self.attempt, 1, True)
        self.num_in_flight_tokens = self.num_in_flight_steps = 0

    def announce(self) -> NewSequence:
        """What the executor is told at admission; the blocks of computed tokens count as sent."""
        sampling = self.request.sampling
        return NewSequence(
            seq_id=self.seq_id,
            token_ids=tuple(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_planned_tokens,
            block_ids=self.table.take_unsent(self.num_planned_tokens),
            sampling=replace(sampling, seed=(sampling.seed + self.index) % 2**64) if self.index else sampling,
            stop=self.request.stop,
        )

    def update(
        self,
        token_ids: tuple[int, ...] = (),
        *,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        error_message: str = "",
    ) -> SequenceUpdate:
        """News of this sequence for the edge."""
        return SequenceUpdate(
            self.request.request_id, self.seq_id, self.index, token_ids, finish_reason, stop_token_id, error_message
        )

    def check_integrity(self) -> None:
        """Raises AssertionError with the values unless the drawing at the top holds."""
        planned, known = self.num_planned_tokens, self.num_known_tokens
        who = f"sequence {self.seq_id}"
        assert self.num_applied_tokens <= planned <= known, f"{who}: {self.num_applied_tokens=}, {planned=}, {known=}"
        assert planned <= self.table.num_slots, f"{who}: {planned} tokens planned in {self.table.num_slots} slots"
        assert known <= self.max_known_tokens, f"{who}: {known} tokens known of at most {self.max_known_tokens}"
        assert len(self.keys) == (len(self.token_ids) // self.table.block_size if self.is_keyed else 0), (
            f"{who}: {len(self.keys)} keys"
        )

    def _extend_keys(self) -> None:
        start = len(self.keys) * self.table.block_size
        parent = self.keys[-1] if self.keys else None
        self.keys += chain_keys(self.request.root_key, self.token_ids[start:], self.table.block_size, parent=parent)
