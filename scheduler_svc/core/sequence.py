"""One sample of a request: its tokens, how far they are planned and applied, and its blocks. Bookkeeping without policy.

    WAITING ── admit ──> RUNNING ── end ──> FINISHED
       ^ └──────────────────┼── cancel ───────^
       └──── preempt ───────┘

Token positions, from the left:

    |<------------------- token_ids ------------------->|<------ in flight ------->|   known (the right part to the executor only)
    |<---- num_applied ---->|
    |<------- num_planned (in a block, or will be by a step that was planned) ---->|   at most known

A sequence that just goes on decoding is part of the decodes (decodes.py). Then its planned and known tokens grow by one with each
of their steps: they are kept as a difference to the count of those steps, and no step touches the sequence.
"""

import enum
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from common.block_hash import next_key
from common.ids import BlockId, BlockKey, SeqId
from scheduler_svc.core.account import Account
from scheduler_svc.core.block_table import BlockTable
from scheduler_svc.core.plan import Chunk, NewSequence, SampleId, SequenceUpdate
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.ticks import Ticks


class PlannedChunk(NamedTuple):
    """A chunk in flight of a sequence that was not one of the decodes.

    Attributes:
        is_sampling: whether the chunk reached the end of the known tokens.
    """

    sequence: "Sequence"
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
        num_applied_tokens: see the drawing; of a sequence that decodes it is brought up to date when a block is complete.
        last_step_id: of the newest step with a chunk of it that counts, see OutstandingSteps.have; 0: of none.
        num_listed: leading blocks that were handed to the prefix index, by this sequence or by the one they came from.
        num_offered: leading blocks that were offered to the store, likewise.
        awaited_key: while waiting: the promised key that it waits for.
        account: of whoever pays for it; the policy sets it.
        tier: how safe its place is while it runs, for the policy: room is taken from higher first. Fixed while it runs.
        claim: at its admission room may be taken from tiers above this; at least its tier.
        was_admitted: had a place in the batch, here or elsewhere; its prompt is paid for.
        num_preemptions: how often it lost its place to others.
        num_lost_tokens: that were planned when it did so last.
        sample: who it is, for news.
        decode: a chunk of one token of it without a new block.
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
    num_applied_tokens: int = 0
    last_step_id: int = 0
    num_listed: int = 0
    num_offered: int = 0
    awaited_key: BlockKey | None = None
    account: Account = field(default_factory=Account)
    tier: int = field(init=False)
    claim: int = field(init=False)
    was_admitted: bool = False
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    stop_token_ids: frozenset[int] = field(init=False)
    sample: SampleId = field(init=False)
    decode: Chunk = field(init=False)
    _num_planned: int = field(default=0, init=False)
    _num_known: int = field(init=False)
    _ticks: Ticks | None = field(default=None, init=False)  # of the decodes; then _num_planned is relative to it
    _num_tokens_at_preemption: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self.stop_token_ids = self.request.stop.stop_token_ids
        self.sample = SampleId(self.request.request_id, self.seq_id, self.index)
        self.decode = Chunk(self.seq_id, 1)
        self.tier = self.claim = self.request.service_class
        self.was_admitted = bool(self.request.generated)
        self._num_known = len(self.token_ids)

    @property
    def rank(self) -> tuple[int, tuple[int, int]]:
        """Its place among those that run: who is behind may have to make room for who is ahead. Fixed while it runs."""
        return self.tier, self.order

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_planned_tokens(self) -> int:
        """See the drawing."""
        return self._num_planned if self._ticks is None else self._num_planned + self._ticks.count

    @property
    def num_known_tokens(self) -> int:
        """Tokens that the executor knows when all planned steps are done."""
        return self._num_known if self._ticks is None else self._num_planned + self._ticks.count + 1

    @property
    def is_decoding(self) -> bool:
        """Whether it is one of the decodes."""
        return self._ticks is not None

    @property
    def is_protected(self) -> bool:
        """It was preempted and has not got a token since: it may not be preempted again."""
        return len(self.token_ids) == self._num_tokens_at_preemption

    def protect(self) -> None:
        """It is preempted."""
        self._num_tokens_at_preemption = len(self.token_ids)

    def append(self, token_id: int) -> FinishReason | None:
        """Takes a token that the executor drew, and says whether it is the last.

        Stop ids need no look at min_tokens: the executor does not draw them before.
        """
        self.token_ids.append(token_id)
        self.extend_keys()
        return self.reason_to_end()

    def reason_to_end(self) -> FinishReason | None:
        """Whether its newest token is its last."""
        if self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_known_tokens:
            return FinishReason.LENGTH
        return None

    def extend_keys(self) -> None:
        """Names the block that its newest token made full, if it did."""
        keys = self.keys
        start = len(keys) * self.table.block_size
        if self.is_keyed and len(self.token_ids) == start + self.table.block_size:
            keys.append(next_key(self.request.root_key, self.token_ids[start:], keys[-1] if keys else None))

    def become_running(self, block_ids: list[BlockId], num_shared: int, num_tokens: int) -> None:
        """It has its blocks; the first num_shared are listed by others, the first num_tokens tokens need not be computed."""
        self.status = SequenceStatus.RUNNING
        self.table.block_ids = block_ids
        self._num_planned = self.num_applied_tokens = num_tokens
        self.num_listed = self.num_offered = num_shared
        self.awaited_key = None

    def become_waiting(self) -> None:
        """It has lost its blocks, and is not one of the decodes."""
        self.status = SequenceStatus.WAITING
        self._num_planned = self.num_applied_tokens = 0
        self.num_listed = self.num_offered = 0

    def note_planned(self, num_tokens: int, step_id: int, *, is_sampling: bool) -> None:
        """A step was planned with a chunk of it."""
        self._num_planned += num_tokens
        self._num_known += is_sampling
        self.last_step_id = step_id

    def begin_decoding(self, ticks: Ticks) -> None:
        """From now on each step of the decodes plans the one token that it lacks."""
        self._num_planned -= ticks.count
        self._ticks = ticks

    def end_decoding(self, step_id: int) -> None:
        """No more; the decodes' newest step was step_id."""
        self._num_planned, self._num_known = self.num_planned_tokens, self.num_known_tokens
        self._ticks = None
        self.last_step_id = step_id

    def void_steps(self) -> None:
        """Results of steps in flight will not count; it is not one of the decodes."""
        self._num_known = len(self.token_ids)
        self.last_step_id = 0

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
