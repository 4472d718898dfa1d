"""The sequences that just go on decoding: each lacks one token, in every step, until its last. Kept from step to step.

What a step of them is does not change from one to the next, except for those that begin, end or need another block. So a step
copies a few lists and touches the sequences for which something happens:

    in the step that computes       the first token of a block: it needs the block       due()
                                    the last token of a block: it can be listed          DecodeStep.filling
                                    its own last token: it leaves                        DecodeStep.last
    when a result brings            the last token of a block: the block has a key       DecodeStep.completing

Each sequence meets a block's border at the same count of steps modulo the block size as long as it is here. Knows positions;
does not know blocks, or why somebody comes and goes.
"""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.ids import SeqId
from scheduler_svc.core.plan import Chunk, SampleId
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.ticks import Ticks


@dataclass(frozen=True, slots=True)
class Rows:
    """The decodes of a step, a column for each thing that is needed of them; in order of rank."""

    sequences: list[Sequence] = field(default_factory=list)
    seq_ids: list[SeqId] = field(default_factory=list)
    samples: list[SampleId] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    stops: list[frozenset[int]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def insert(self, position: int, sequence: Sequence) -> None:
        """Puts in a row."""
        self.sequences.insert(position, sequence)
        self.seq_ids.insert(position, sequence.seq_id)
        self.samples.insert(position, sequence.sample)
        self.outputs.insert(position, sequence.token_ids)
        self.stops.insert(position, sequence.stop_token_ids)
        self.chunks.insert(position, sequence.decode)

    def delete(self, position: int) -> None:
        """Takes out a row."""
        for column in (self.sequences, self.seq_ids, self.samples, self.outputs, self.stops, self.chunks):
            del column[position]

    def copy(self) -> "Rows":
        """The same rows, to be changed."""
        return Rows(self.sequences[:], self.seq_ids[:], self.samples[:], self.outputs[:], self.stops[:], self.chunks[:])


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One step of the decodes, in flight.

    Attributes:
        filling: sequences whose block is computed to its end by this step.
        completing: sequences whose block is known to its end by the token that this step draws.
        last: sequences whose last token this step draws; all in order of rank.
    """

    rows: Rows
    chunks: tuple[Chunk, ...]
    filling: list[Sequence]
    completing: list[Sequence]
    last: list[Sequence]


class Decodes:
    """See the module's first lines.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._ticks = Ticks()
        self._ranks: list[tuple[int, tuple[int, int]]] = []
        self._rows = Rows()
        self._is_shared = False  # a step in flight has the rows, too
        # By the count of steps, modulo the block size, at which the first token of a block is computed; in order of rank.
        self._by_border: list[list[Sequence]] = [[] for _ in range(block_size)]
        self._by_last: dict[int, list[Sequence]] = {}
        self._targets_s: dict[SeqId, float] = {}
        self._num_planned = 0  # of all together, relative to the count of steps

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def last(self) -> Sequence | None:
        """The last in rank; None: there are none."""
        return self._rows.sequences[-1] if self._rows.sequences else None

    @property
    def num_context_tokens(self) -> int:
        """Tokens that the next step attends to."""
        return self._num_planned + len(self._ranks) * (self._ticks.count + 1)

    @property
    def tightest_target_s(self) -> float | None:
        """The shortest time between tokens that one of them would like; None: nobody says."""
        return min(self._targets_s.values(), default=None)

    def due(self) -> list[Sequence]:
        """Those whose next token is the first of a block, in order of rank."""
        return list(self._by_border[self._ticks.count % self._block_size])

    def join(self, sequence: Sequence) -> None:
        """Takes in a running sequence that lacks one token and may get another one after it."""
        count = self._ticks.count
        num_planned = sequence.num_planned_tokens
        position = bisect.bisect_left(self._ranks, sequence.rank)
        self._own_rows()
        self._ranks.insert(position, sequence.rank)
        self._rows.insert(position, sequence)
        bisect.insort(self._by_border[(count - num_planned) % self._block_size], sequence, key=_rank)
        bisect.insort(self._by_last.setdefault(_last_count(sequence, num_planned - count), []), sequence, key=_rank)
        target_s = sequence.request.tpot_target_s
        if target_s is not None:
            self._targets_s[sequence.seq_id] = target_s
        self._num_planned += num_planned - count
        sequence.begin_decoding(self._ticks)
        sequence.account.begin_decoding(self._ticks)

    def leave(self, sequence: Sequence, step_id: int) -> None:
        """Lets one go; step_id: of the newest step that was planned."""
        sequence.account.end_decoding()
        sequence.end_decoding(step_id)
        num_planned = sequence.num_planned_tokens - self._ticks.count
        position = bisect.bisect_left(self._ranks, sequence.rank)
        self._own_rows()
        del self._ranks[position]
        self._rows.delete(position)
        self._by_border[-num_planned % self._block_size].remove(sequence)
        last = _last_count(sequence, num_planned)
        self._by_last[last].remove(sequence)
        if not self._by_last[last]:
            del self._by_last[last]
        self._targets_s.pop(sequence.seq_id, None)
        self._num_planned -= num_planned

    def advance(self, step_id: int, with_blocks: Mapping[SeqId, Chunk]) -> DecodeStep:
        """Plans one token of each.

        Args:
            step_id: of the step.
            with_blocks: the chunks of those that got a block for it.
        """
        count, size, rows = self._ticks.count, self._block_size, self._rows
        filling = list(self._by_border[(count + 1) % size])
        completing = list(self._by_border[(count + 2) % size])
        last = list(self._by_last.get(count, ()))
        chunks = tuple(map(with_blocks.get, rows.seq_ids, rows.chunks)) if with_blocks else tuple(rows.chunks)
        self._is_shared = True
        self._ticks.count = count + 1
        for sequence in last:
            self.leave(sequence, step_id)
        return DecodeStep(rows, chunks, filling, completing, last)

    def check_integrity(self) -> None:
        """Raises AssertionError with the values unless every sequence is where its position says."""
        rows = self._rows
        assert self._ranks == sorted(self._ranks) == [sequence.rank for sequence in rows.sequences], "decodes are out of order"
        assert rows.seq_ids == [sequence.seq_id for sequence in rows.sequences], f"{rows.seq_ids=} are others'"
        num_context = sum(sequence.num_known_tokens for sequence in rows.sequences)
        assert num_context == self.num_context_tokens, f"{num_context} tokens of context, counted {self.num_context_tokens}"
        placed = sorted(sequence.seq_id for sequences in self._by_border for sequence in sequences)
        assert placed == sorted(rows.seq_ids), f"{placed=} at borders, {rows.seq_ids=}"
        for i, sequences in enumerate(self._by_border):
            for sequence in sequences:
                num_planned = sequence.num_planned_tokens
                assert (self._ticks.count - num_planned - i) % self._block_size == 0, f"{sequence.seq_id} is at border {i}"
        for count, sequences in self._by_last.items():
            for sequence in sequences:
                num_left = sequence.max_known_tokens - sequence.num_known_tokens
                assert count - self._ticks.count == num_left - 1, f"{sequence.seq_id} has {num_left} tokens to come"

    def _own_rows(self) -> None:
        """Before a change: steps in flight keep what they have."""
        if self._is_shared:
            self._rows = self._rows.copy()
            self._is_shared = False


def _last_count(sequence: Sequence, num_planned: int) -> int:
    """The count before the step that draws its last token; num_planned: relative to the count."""
    return sequence.max_known_tokens - 2 - num_planned


def _rank(sequence: Sequence) -> tuple[int, tuple[int, int]]:
    return sequence.rank
