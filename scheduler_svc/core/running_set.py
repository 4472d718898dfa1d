"""The sequences in the batch, in order of rank, and the blocks they hold on the device.

The only place that changes block tables: a sequence gets its blocks in start and grow, and gives them back in stop. Knows the
pool and what the executor has to be told about ends. Does not decide who runs. Everybody in it is one of

    decodes     lack one token, and get it in every step
    begun       lack more: the rest of a prompt
    stalled     lack one token and the block for it
    the rest    lack none: the results to come bring their last tokens
"""

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from common.ids import BlockId, SeqId
from scheduler_svc.core.attachment import Attachment
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.decodes import Decodes
from scheduler_svc.core.outstanding import OutstandingSteps
from scheduler_svc.core.plan import BlockCopy
from scheduler_svc.core.prefix_index import PrefixIndex
from scheduler_svc.core.sequence import Sequence


class RunningSet:
    """See the module's first lines.

    Args:
        pool: of the device.
        outstanding: steps in flight.
        block_size: tokens per block.
        max_sequences: how many may run.
    """

    def __init__(self, pool: BlockPool, outstanding: OutstandingSteps, block_size: int, max_sequences: int):
        self.decodes = Decodes(block_size)
        self.begun: list[Sequence] = []
        """In order of rank."""
        self._stalled: list[Sequence] = []
        self._pool = pool
        self._outstanding = outstanding
        self._block_size = block_size
        self.max_sequences = max_sequences
        self._sequences: list[Sequence] = []
        self._ranks: list[tuple[int, tuple[int, int]]] = []
        self._dropped: list[SeqId] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of rank; the set may change meanwhile."""
        return iter(list(self._sequences))

    @property
    def index(self) -> PrefixIndex:
        """What the device holds."""
        return self._pool.index

    @property
    def is_full(self) -> bool:
        """Whether no other sequence may start."""
        return len(self._sequences) >= self.max_sequences

    @property
    def num_empty_slots(self) -> int:
        """Slots without a known token. Only blocks that one sequence has for itself contain such."""
        return sum(max(0, sequence.table.num_slots - sequence.num_known_tokens) for sequence in self._sequences)

    def behind(self, sequence: Sequence) -> list[Sequence]:
        """The sequences behind a running one, in order of rank."""
        return self._sequences[bisect.bisect_right(self._ranks, sequence.rank) :]

    def has_behind_tier(self, tier: int) -> bool:
        """Whether anybody of a less urgent tier runs."""
        return bool(self._sequences) and self._sequences[-1].tier > tier

    def behind_tier(self, tier: int) -> list[Sequence]:
        """The sequences of less urgent tiers, in order of rank."""
        start = bisect.bisect_right(self._sequences, tier, key=lambda other: other.tier)
        return self._sequences[start:]

    def can_take(self, num_blocks: int) -> bool:
        """Whether so many blocks can go to somebody new, and one still is left for each sequence that runs."""
        return num_blocks + len(self._sequences) <= self._pool.num_available

    def affordable(self, sequence: Sequence, attachment: Attachment, *, is_loaded: bool = False) -> Attachment | None:
        """The attachment that a waiting sequence can start with: a copy needs one block more than computing.

        Args:
            sequence: waiting.
            attachment: that was found for it.
            is_loaded: blocks were loaded for it. There was a block for each that runs when that began; by now some have been
                taken, and as long as it does not run its own would be next.

        Returns:
            None: there are not enough blocks.
        """
        for option in (attachment, attachment.without_copy(self._block_size)):
            taken = option.shared if option.copy_source is None else [*option.shared, option.copy_source]
            num_blocks = self._num_new_blocks(sequence, option) + self._pool.num_cached_of(taken)
            if self.can_take(num_blocks - (len(self) + 1) // 2 if is_loaded else num_blocks):
                return option
        return None

    def would_suffice(self, sequence: Sequence, attachment: Attachment, victims: Seq[Sequence]) -> bool:
        """Whether there may be blocks for a waiting sequence when all the victims that are not protected have stopped.

        Blocks that they share with others do not come free, so it can turn out not to be enough.
        """
        free = [victim for victim in victims if not victim.is_protected]
        num_blocks = self._pool.num_available + sum(len(victim.table.block_ids) for victim in free)
        return self._num_new_blocks(sequence, attachment) + len(self._sequences) - len(free) <= num_blocks

    def start(self, sequence: Sequence, attachment: Attachment) -> BlockCopy | None:
        """Takes in a waiting sequence, with blocks for all its known tokens. What it will list is promised.

        Args:
            sequence: waiting.
            attachment: an affordable one.

        Returns:
            The copy that the executor has to make. Its source has one more reference; the caller releases it when nothing can
            take the block before the copy is made.
        """
        pool, shared = self._pool, attachment.shared
        for block_id in shared:
            pool.retain(block_id)
        if attachment.copy_source is not None:
            pool.retain(attachment.copy_source)
        num_new = self._num_new_blocks(sequence, attachment)
        block_ids = pool.allocate(num_new, after=shared[-1] if shared else None)
        assert block_ids is not None, f"{num_new} blocks were counted on, {pool.num_available} are available"
        sequence.become_running(shared + block_ids, len(shared), attachment.num_tokens)
        pool.index.promise(sequence.keys[sequence.num_listed :], sequence.seq_id)
        place = bisect.bisect_left(self._ranks, sequence.rank)
        self._ranks.insert(place, sequence.rank)
        self._sequences.insert(place, sequence)
        sequence.account.num_running += 1
        sequence.account.num_blocks += len(sequence.table.block_ids)
        return None if attachment.copy_source is None else BlockCopy(attachment.copy_source, block_ids[0])

    def short_of_blocks(self) -> list[Sequence]:
        """Those whose next token may need a block, or the executor's hearing of one; in order of rank."""
        due = self.decodes.due()
        return sorted(due + self._stalled, key=_rank) if self._stalled else due

    def stall(self, sequence: Sequence) -> None:
        """There is no block for a sequence that decodes, or it steps aside for once."""
        if sequence.is_decoding:
            self.decodes.leave(sequence, self._outstanding.planned_step_id)
            self._stalled.append(sequence)

    def go_on(self, sequence: Sequence) -> None:
        """A stalled one has its block."""
        self._stalled.remove(sequence)
        self.decodes.join(sequence)

    def settle(self, sequence: Sequence) -> None:
        """A step was planned with a chunk of a sequence that is none of the decodes."""
        num_missing = sequence.num_known_tokens - sequence.num_planned_tokens
        if num_missing > 1:
            if sequence not in self.begun:
                bisect.insort(self.begun, sequence, key=_rank)
            return
        if sequence in self.begun:
            self.begun.remove(sequence)
        if num_missing == 1 and sequence.num_known_tokens < sequence.max_known_tokens:
            self.decodes.join(sequence)

    def grow(self, sequence: Sequence) -> bool:
        """Appends a block, right behind the last one if that is free.

        Returns:
            False: there is none.
        """
        block_ids = sequence.table.block_ids
        block_id = self._pool.allocate_one(after=block_ids[-1])
        if block_id is None:
            return False
        block_ids.append(block_id)
        sequence.account.num_blocks += 1
        return True

    def stop(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks. The executor hears of it with the next plan, even if the sequence failed there."""
        if sequence.is_decoding:
            self.decodes.leave(sequence, self._outstanding.planned_step_id)
        elif sequence in self.begun:
            self.begun.remove(sequence)
        elif sequence in self._stalled:
            self._stalled.remove(sequence)
        place = bisect.bisect_left(self._ranks, sequence.rank)
        del self._ranks[place], self._sequences[place]
        sequence.account.num_running -= 1
        sequence.account.num_blocks -= len(sequence.table.block_ids)
        self._pool.index.withdraw(sequence.keys[sequence.num_listed :], sequence.seq_id)
        self._pool.release(sequence.table.clear())
        sequence.become_waiting()
        self._dropped.append(sequence.seq_id)

    def take_dropped(self) -> list[SeqId]:
        """Sequences that were stopped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def list_blocks(self, sequences: Iterable[Sequence]) -> None:
        """Lets others find blocks whose tokens are all known and planned, as long as the steps in flight do not fail."""
        index, newest, size = self._pool.index, self._outstanding.newest, self._block_size
        for sequence in sequences:
            start, keys = sequence.num_listed, sequence.keys
            if start >= len(keys):
                continue
            end = min(len(keys), sequence.num_planned_tokens // size)
            if end <= start:
                continue
            sequence.num_listed = end
            index.withdraw(keys[start:end], sequence.seq_id)
            block_ids = sequence.table.block_ids
            for position in range(start, end):
                if index.add(keys[position], block_ids[position]) and newest is not None:
                    newest.listed.append((block_ids[position], sequence))

    def offer_saves(self, sequence: Sequence) -> None:
        """Offers the store what is computed for certain. A block whose content has another block in the index is left out."""
        start = sequence.num_offered
        end = min(sequence.num_listed, sequence.num_applied_tokens // self._block_size)
        for position in range(start, end):
            self._pool.offer_save(sequence.keys[position], sequence.table.block_ids[position])
        sequence.num_offered = max(start, end)

    def check_integrity(self, num_other_refs: Counter[BlockId]) -> None:
        """Raises AssertionError when tables and pool disagree, or a block that will be written has other readers.

        Args:
            num_other_refs: references by others.
        """
        self.decodes.check_integrity()
        num_refs = num_other_refs.copy()
        for sequence in self._sequences:
            sequence.check_integrity()
            num_missing = sequence.num_known_tokens - sequence.num_planned_tokens
            where = (sequence.is_decoding, sequence in self.begun, sequence in self._stalled)
            is_last = sequence.num_known_tokens == sequence.max_known_tokens
            assert sum(where) == (num_missing > 0 and not (num_missing == 1 and is_last)), f"{num_missing} missing, {where}"
            assert where[1] == (num_missing > 1), f"sequence {sequence.seq_id} lacks {num_missing} tokens, {where}"
            num_refs.update(sequence.table.block_ids)
            first_written = sequence.num_planned_tokens // self._block_size
            for block_id in sequence.table.block_ids[first_written:]:
                assert self._pool.num_refs(block_id) == 1, f"block {block_id} will be written and is shared"
                assert self._pool.index.key_of(block_id) is None, f"block {block_id} will be written and is listed"
        counted = self._pool.referenced()
        assert num_refs == counted, f"references by block are {dict(num_refs)}, counted {counted}"
        assert len(self) <= self.max_sequences, f"{len(self)} sequences run, at most {self.max_sequences} may"
        begun = [sequence.rank for sequence in self.begun]
        assert begun == sorted(begun), f"begun sequences are out of order: {begun}"
        ranks = [sequence.rank for sequence in self._sequences]
        assert ranks == self._ranks == sorted(ranks), f"running sequences are out of order: {ranks}"
        owners = set(self._pool.index.promised_by().values()) - {None}
        strangers = owners - {sequence.seq_id for sequence in self._sequences}
        assert not strangers, f"sequences {strangers} made promises and do not run"

    def _num_new_blocks(self, sequence: Sequence, attachment: Attachment) -> int:
        return -(-len(sequence.token_ids) // self._block_size) - len(attachment.shared)


def _rank(sequence: Sequence) -> tuple[int, tuple[int, int]]:
    return sequence.rank
