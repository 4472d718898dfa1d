"""The running batch: what each sequence knows, and one step of it packed into flat arrays.

Knows token ids, block tables and plans. Does not know tensors, models, sampling or the wire. Its arrays live as long as the
batch; a sequence is a row of them:

    tokens       int32 [max_num_seqs, max_model_len + 1]     |<- computed ->|<- known, KV not yet computed ->|  unused  |
                                                             0      num_computed_tokens              num_tokens
    block_tables int32 [max_num_seqs, ceil((max_model_len + 1) / block_size)]

A chunk that reaches num_tokens samples: its token is appended and is known to the very next plan, which therefore may be
made before the result is out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
import numpy.typing as npt

from common.errors import InvalidParameter, SequenceFailed
from common.ids import SeqId
from executor_svc.core.plan import BatchLimits, Chunk, NewSequence, SamplingT, SequenceFailure, StepPlan


@dataclass(slots=True)
class BatchSequence(Generic[SamplingT]):
    """A sequence of the running batch; only BatchState changes it.

    Attributes:
        row: its row of the batch's arrays.
        num_tokens: tokens known, sampled ones included.
        num_computed_tokens: tokens whose KV is in its blocks.
    """

    seq_id: SeqId
    row: int
    sampling: SamplingT
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int


@dataclass(slots=True)  # made for every sequence in every step, which takes three times as long if it is frozen
class ScheduledChunk(Generic[SamplingT]):
    """What one sequence computes in this step: the tokens at positions start..stop-1. Nobody changes it.

    Attributes:
        samples: the chunk reaches the end of what is known, so a token is drawn after it.
    """

    sequence: BatchSequence[SamplingT]
    start: int
    stop: int
    samples: bool


@dataclass(frozen=True, slots=True)
class PackedStep(Generic[SamplingT]):
    """A step without padding: the tokens of all chunks one after the other, chunks of one token (decodes) first.

    Attributes:
        chunks: in packed order; S of them with T tokens together.
        input_ids, positions: int64 [T].
        slot_mapping: int64 [T], block * block_size + offset where a token's KV goes.
        cu_seqlens_q: int32 [S + 1], chunk i is tokens cu_seqlens_q[i]..cu_seqlens_q[i + 1] - 1.
        seq_lens: int32 [S], tokens that the last token of the chunk attends to, itself included.
        block_tables: int32 [S, max over chunks of ceil(seq_len / block_size)], 0 beyond a sequence's own blocks.
        known_lens: int32 [S], all tokens known of each chunk's sequence, at least seq_lens.
        num_decodes: how many of the chunks have one token.
        sample_indices: int64 [n], index in T of the last token of each chunk that samples.
        sampled_chunks: those n chunks, in packed order.
        rows: int64 [S], of the batch.
        samples: bool [S], whether a chunk samples.
    """

    chunks: Sequence[ScheduledChunk[SamplingT]]
    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    cu_seqlens_q: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    known_lens: npt.NDArray[np.int32]
    num_decodes: int
    sample_indices: npt.NDArray[np.int64]
    sampled_chunks: Sequence[ScheduledChunk[SamplingT]]
    rows: npt.NDArray[np.int64]
    samples: npt.NDArray[np.bool_]


class BatchState(Generic[SamplingT]):
    """Every live sequence of one session.

    A sequence that a plan gets wrong fails alone: it is dropped, reported once, and later chunks for it are skipped until the
    scheduler drops it as well, because the next plan may be on its way already.
    """

    def __init__(self, limits: BatchLimits):
        self.limits = limits
        self._max_blocks = -(-(limits.max_model_len + 1) // limits.block_size)
        # Zero pages cost nothing until a row is used to that length.
        self._tokens = np.zeros((limits.max_num_seqs, limits.max_model_len + 1), np.int32)
        self._block_tables = np.zeros((limits.max_num_seqs, self._max_blocks), np.int32)
        self._sequences: dict[SeqId, BatchSequence[SamplingT]] = {}
        self._failed: set[SeqId] = set()
        self._free_rows = list(range(limits.max_num_seqs))[::-1]
        self._tenancies = np.zeros(limits.max_num_seqs, np.int64)
        self._last_step_id = 0

    def __len__(self) -> int:
        """Number of live sequences."""
        return len(self._sequences)

    def __contains__(self, seq_id: SeqId) -> bool:
        """Whether the sequence is alive."""
        return seq_id in self._sequences

    def clear(self) -> None:
        """Drops everything, as for a new session."""
        for seq_id in list(self._sequences):
            self._release(seq_id)
        self._failed.clear()
        self._last_step_id = 0

    def apply(self, plan: StepPlan[SamplingT]) -> tuple[list[ScheduledChunk[SamplingT]], list[SequenceFailure]]:
        """Applies the delta. Block copies are only checked; the owner of the memory carries them out.

        Returns:
            The chunks to compute, in the order of the plan, and the sequences that the plan got wrong.

        Raises:
            InvalidParameter: the plan as a whole makes no sense; nothing was applied.
        """
        self._check_plan(plan)
        self._last_step_id = plan.step_id
        failures: list[SequenceFailure] = []
        for seq_id in plan.dropped_seq_ids:
            if seq_id in self._failed:
                self._failed.remove(seq_id)
            elif seq_id in self._sequences:
                self._release(seq_id)
            else:
                failures.append(SequenceFailure(seq_id, f"plan.dropped_seq_ids: unknown sequence {seq_id}"))
        for new in plan.new_sequences:
            try:
                self._add(new)
            except SequenceFailed as error:
                failures.append(self.fail(new.seq_id, error.message))
        scheduled: list[ScheduledChunk[SamplingT]] = []
        for chunk in plan.chunks:
            if chunk.seq_id in self._failed:
                continue
            try:
                scheduled.append(self._schedule(chunk))
            except SequenceFailed as error:
                failures.append(self.fail(chunk.seq_id, error.message))
        return scheduled, failures

    def pack(self, chunks: Sequence[ScheduledChunk[SamplingT]]) -> PackedStep[SamplingT]:
        """Lays chunks out for one forward pass; changes nothing. At least one chunk."""
        ordered = sorted(chunks, key=lambda chunk: chunk.stop - chunk.start != 1)
        count = len(ordered)
        rows = np.fromiter((chunk.sequence.row for chunk in ordered), np.int64, count)
        starts = np.fromiter((chunk.start for chunk in ordered), np.int64, count)
        stops = np.fromiter((chunk.stop for chunk in ordered), np.int64, count)
        samples = np.fromiter((chunk.samples for chunk in ordered), np.bool_, count)
        lengths = stops - starts
        cu_seqlens_q = np.zeros(count + 1, np.int32)
        np.cumsum(lengths, out=cu_seqlens_q[1:])
        num_decodes = int(np.count_nonzero(lengths == 1))
        if num_decodes == count:
            token_rows, positions = rows, starts
        else:
            token_rows = np.repeat(rows, lengths)
            positions = np.arange(cu_seqlens_q[-1], dtype=np.int64) + np.repeat(starts - cu_seqlens_q[:-1], lengths)
        block_size = self.limits.block_size
        block_idx, offset = np.divmod(positions, block_size)
        used_blocks = -(-int(stops.max()) // block_size)
        return PackedStep(
            chunks=ordered,
            input_ids=self._tokens[token_rows, positions].astype(np.int64),
            positions=positions,
            slot_mapping=self._block_tables[token_rows, block_idx].astype(np.int64) * block_size + offset,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=stops.astype(np.int32),
            block_tables=np.ascontiguousarray(self._block_tables[rows, :used_blocks]),
            known_lens=np.fromiter((chunk.sequence.num_tokens for chunk in ordered), np.int32, count),
            num_decodes=num_decodes,
            sample_indices=(cu_seqlens_q[1:][samples] - 1).astype(np.int64),
            sampled_chunks=[chunk for chunk in ordered if chunk.samples],
            rows=rows,
            samples=samples,
        )

    def advance(self, chunk: ScheduledChunk[SamplingT]) -> None:
        """The KV of the chunk's tokens is in the sequence's blocks."""
        chunk.sequence.num_computed_tokens = chunk.stop

    def append_token(self, seq_id: SeqId, token_id: int) -> None:
        """The sequence knows one more token."""
        sequence = self._sequences[seq_id]
        self._tokens[sequence.row, sequence.num_tokens] = token_id
        sequence.num_tokens += 1

    def advance_ahead(self, chunks: Sequence[ScheduledChunk[SamplingT]]) -> None:
        """As advance for chunks whose work is queued; those that sample know one more token, whose id is not here yet."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed_tokens = chunk.stop
            if chunk.samples:
                sequence.num_tokens += 1

    def tenancies(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many sequences have had each row so far, the present one included; int64, as many as rows."""
        return self._tenancies[rows]

    def learn(
        self,
        rows: npt.NDArray[np.int64],
        tenancies: npt.NDArray[np.int64],
        indices: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int64],
    ) -> None:
        """The ids of tokens that advance_ahead counted have come; those of sequences that were dropped meanwhile are ignored.

        Args:
            rows: int64 [n], where the sequences were.
            tenancies: int64 [n], what tenancies said of the rows then.
            indices: int64 [n], the token's place in its sequence.
            token_ids: int64 [n].
        """
        stays = self._tenancies[rows] == tenancies
        self._tokens[rows[stays], indices[stays]] = token_ids[stays]

    def is_alive(self, sequence: BatchSequence[SamplingT]) -> bool:
        """Whether this very sequence is in the batch, not one that came back under its id."""
        return self._sequences.get(sequence.seq_id) is sequence

    def sequence(self, seq_id: SeqId) -> BatchSequence[SamplingT] | None:
        """The live sequence of that id."""
        return self._sequences.get(seq_id)

    def token_ids(self, seq_id: SeqId) -> npt.NDArray[np.int32]:
        """The known tokens of a live sequence, int32 [num_tokens]: a view that is good until the sequence is dropped."""
        sequence = self._sequences[seq_id]
        return self._tokens[sequence.row, : sequence.num_tokens]

    def fail(self, seq_id: SeqId, message: str) -> SequenceFailure:
        """Drops a sequence that cannot go on; chunks for it are skipped until the scheduler drops it."""
        if seq_id in self._sequences:
            self._release(seq_id)
        self._failed.add(seq_id)
        return SequenceFailure(seq_id, message)

    def check_integrity(self) -> None:
        """Raises AssertionError when the batch contradicts itself."""
        rows = [sequence.row for sequence in self._sequences.values()]
        assert sorted(rows + self._free_rows) == list(range(self.limits.max_num_seqs)), "rows are not each free or used once"
        assert not self._failed & self._sequences.keys(), "a failed sequence is alive"
        for seq_id, sequence in self._sequences.items():
            assert sequence.seq_id == seq_id
            assert 0 <= sequence.num_computed_tokens < sequence.num_tokens <= self.limits.max_model_len + 1, sequence
            assert 0 < sequence.num_prompt_tokens <= sequence.num_tokens, sequence
            assert sequence.num_blocks <= self._max_blocks, sequence
            assert sequence.num_computed_tokens <= sequence.num_blocks * self.limits.block_size, sequence
            table = self._block_tables[sequence.row]
            used = table[: sequence.num_blocks]
            assert ((used >= 0) & (used < self.limits.num_blocks)).all(), sequence
            assert not table[sequence.num_blocks :].any(), "a block table is not zero beyond its blocks"
            tokens = self._tokens[sequence.row, : sequence.num_tokens]
            assert ((tokens >= 0) & (tokens < self.limits.vocab_size)).all(), sequence

    def _check_plan(self, plan: StepPlan[SamplingT]) -> None:
        if plan.step_id != self._last_step_id + 1:
            raise InvalidParameter("plan.step_id", f"{plan.step_id} does not follow {self._last_step_id}")
        for field, seq_ids in (
            ("plan.dropped_seq_ids", plan.dropped_seq_ids),
            ("plan.new_sequences", [new.seq_id for new in plan.new_sequences]),
            ("plan.chunks", [chunk.seq_id for chunk in plan.chunks]),
        ):
            if len(set(seq_ids)) != len(seq_ids):
                raise InvalidParameter(field, "names a sequence twice")
        dropped = set(plan.dropped_seq_ids)
        for new in plan.new_sequences:
            if (new.seq_id in self._sequences or new.seq_id in self._failed) and new.seq_id not in dropped:
                raise InvalidParameter("plan.new_sequences", f"sequence {new.seq_id} exists already")
        num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
        if num_tokens > self.limits.max_num_batched_tokens:
            raise InvalidParameter(
                "plan.chunks", f"{num_tokens} tokens in one step, the limit is {self.limits.max_num_batched_tokens}"
            )
        for pair in plan.block_copies:
            if max(pair) >= self.limits.num_blocks or min(pair) < 0:
                raise InvalidParameter(
                    "plan.block_copies", f"{pair[0]} -> {pair[1]}: the device has {self.limits.num_blocks} blocks"
                )

    def _add(self, new: NewSequence[SamplingT]) -> None:
        limits, num_tokens = self.limits, len(new.token_ids)
        if not 0 < num_tokens <= limits.max_model_len:
            raise SequenceFailed(f"token_ids: {num_tokens} tokens, expected 1..{limits.max_model_len}")
        if not 0 < new.num_prompt_tokens <= num_tokens:
            raise SequenceFailed(f"num_prompt_tokens: {new.num_prompt_tokens}, expected 1..{num_tokens}")
        if not 0 <= new.num_computed_tokens < num_tokens:
            raise SequenceFailed(f"num_computed_tokens: {new.num_computed_tokens}, expected 0..{num_tokens - 1}")
        tokens = np.asarray(new.token_ids, np.int64)
        if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
            raise SequenceFailed(f"token_ids: an id is outside the vocabulary of {limits.vocab_size}")
        if not self._free_rows:
            raise SequenceFailed(f"more than {limits.max_num_seqs} sequences at once (max_num_seqs)")
        row = self._free_rows.pop()
        self._tenancies[row] += 1
        self._tokens[row, :num_tokens] = tokens
        sequence = BatchSequence(
            seq_id=new.seq_id,
            row=row,
            sampling=new.sampling,
            num_prompt_tokens=new.num_prompt_tokens,
            num_tokens=num_tokens,
            num_computed_tokens=new.num_computed_tokens,
            num_blocks=0,
        )
        self._sequences[new.seq_id] = sequence
        self._append_blocks(sequence, new.block_ids)
        if sequence.num_blocks * limits.block_size < new.num_computed_tokens:
            raise SequenceFailed(
                f"num_computed_tokens: {new.num_computed_tokens} do not fit in {sequence.num_blocks} blocks of "
                f"{limits.block_size}"
            )

    def _append_blocks(self, sequence: BatchSequence[SamplingT], block_ids: Sequence[int]) -> None:
        if not block_ids:
            return
        if min(block_ids) < 0 or max(block_ids) >= self.limits.num_blocks:
            raise SequenceFailed(f"block id outside the device's {self.limits.num_blocks} blocks: {list(block_ids)[:8]}")
        stop = sequence.num_blocks + len(block_ids)
        if stop > self._max_blocks:
            raise SequenceFailed(f"{stop} blocks, a sequence has at most {self._max_blocks}")
        self._block_tables[sequence.row, sequence.num_blocks : stop] = block_ids
        sequence.num_blocks = stop

    def _schedule(self, chunk: Chunk) -> ScheduledChunk[SamplingT]:
        sequence = self._sequences.get(chunk.seq_id)
        if sequence is None:
            raise SequenceFailed(f"plan.chunks: unknown sequence {chunk.seq_id}")
        if chunk.new_block_ids:
            self._append_blocks(sequence, chunk.new_block_ids)
        start = sequence.num_computed_tokens
        stop = start + chunk.num_tokens
        if chunk.num_tokens < 1 or stop > sequence.num_tokens:
            known = sequence.num_tokens - start
            raise SequenceFailed(f"plan.chunks: {chunk.num_tokens} tokens, expected 1..{known} (known and not computed)")
        if stop > self.limits.max_model_len:
            raise SequenceFailed(f"plan.chunks: position {stop - 1} is beyond the model's {self.limits.max_model_len} tokens")
        if stop > sequence.num_blocks * self.limits.block_size:
            raise SequenceFailed(
                f"plan.chunks: position {stop - 1} has no slot in {sequence.num_blocks} blocks of {self.limits.block_size}"
            )
        return ScheduledChunk(sequence, start, stop, samples=stop == sequence.num_tokens)

    def _release(self, seq_id: SeqId) -> None:
        sequence = self._sequences.pop(seq_id)
        # Zero beyond the blocks is what pack promises about rows that come later.
        self._block_tables[sequence.row, : sequence.num_blocks] = 0
        self._free_rows.append(sequence.row)
