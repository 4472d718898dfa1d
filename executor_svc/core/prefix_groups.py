"""Which sequences of a batch begin with the same blocks, and which of them are worth attending together.

Knows block tables. Does not know tokens, tensors or kernels. Block tables only grow while a sequence has its row, so each
table is looked at once, when its sequence joins the decodes, and kept in order:

    tables in order      17 18 19 20 | 17 18 19 33 | 17 18 40 | 51 52 | 51 53
    shared with next            3             2          0       1
                          ──────────────── a group of 3 sharing 2 ──   or   a group of 2 sharing 3: whichever saves more

Sequences with equal leading blocks are neighbours in that order.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints32 = npt.NDArray[np.int32]
MAX_GROUPS = 16
"""Groups of a batch; a power of two."""
SHARED_MULTIPLE = 128
"""Shared lengths are multiples of it, so that kernels have no partial tiles."""
MIN_SHARED_TOKENS = 512
"""A group that shares less is none."""
MIN_SAVED_TOKENS = 49_152
"""Tokens that need not be read twice, of all groups together, from which on a second kernel is worth its launch.

Measured on an H200: 32 thousand gained nothing, 61 thousand a fifth of attention.
"""


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Groups of decodes.

    Attributes:
        lens: int32 [num_groups], tokens shared, multiples of SHARED_MULTIPLE.
        ends: int32 [num_groups], where each group ends in members; the first begins at 0.
        members: int32 [ends[-1]], places in the batch, group by group.
    """

    lens: Ints32
    ends: Ints32
    members: Ints32

    def padded(self, num_decodes: int) -> list[Ints32]:
        """As kernels read them: lens, ends [MAX_GROUPS], members, own_starts [num_decodes]; see kernels.batch.SharedPrefixes."""
        lens, ends = np.zeros(MAX_GROUPS, np.int32), np.full(MAX_GROUPS, len(self.members), np.int32)
        members, own_starts = np.zeros(num_decodes, np.int32), np.zeros(num_decodes, np.int32)
        lens[: len(self.lens)], ends[: len(self.ends)] = self.lens, self.ends
        members[: len(self.members)] = self.members
        own_starts[self.members] = np.repeat(self.lens, np.diff(self.ends, prepend=0))
        return [lens, ends, members, own_starts]


NO_GROUPS = PrefixGroups(*(np.zeros(0, np.int32),) * 3)


@dataclass(frozen=True, slots=True)
class _Group:
    """Places in the order, and the tokens that they all share."""

    places: Sequence[int]
    length: int

    @property
    def saved(self) -> int:
        return (len(self.places) - 1) * self.length


class PrefixIndex:
    """The tables of the sequences that decode, in order. Its groups change only when a sequence joins or leaves.

    Attributes:
        latest: the groups of the last step with decodes.
    """

    def __init__(self, block_size: int):
        """Nothing decodes.

        Args:
            block_size: tokens per block.
        """
        self._block_size = block_size
        self._rows = np.zeros(0, np.int64)
        self._tenancies = np.zeros(0, np.int64)
        self._keys: list[bytes] = []
        self._order: list[int] = []  # rows
        self._lcps: list[int] = []  # blocks that each has in common with the next; as long as the order, the last is 0
        self._key_of: dict[int, bytes] = {}
        self.latest: PrefixGroups | None = None

    def groups(
        self, rows: npt.NDArray[np.int64], tenancies: npt.NDArray[np.int64], seq_lens: Ints32, block_tables: Ints32
    ) -> PrefixGroups | None:
        """Groups of the decodes of a step; None: none that are worth it.

        Args:
            rows: int64 [num_decodes], the batch's row of each.
            tenancies: int64 [num_decodes], says with the row which sequence it is.
            seq_lens: int32 [num_decodes]; the last token's KV is written by this step.
            block_tables: int32 [num_decodes, width].
        """
        if len(rows) == 0:
            return None  # those that decode wait for a step of chunks, and come back
        if np.array_equal(rows, self._rows) and np.array_equal(tenancies, self._tenancies):
            return self.latest
        before = dict(zip(self._rows.tolist(), self._tenancies.tolist(), strict=True))
        now = dict(zip(rows.tolist(), tenancies.tolist(), strict=True))
        for row, tenancy in before.items():
            if now.get(row) != tenancy:
                self._leave(row)
        for place, (row, tenancy) in enumerate(now.items()):
            if before.get(row) != tenancy:
                num_full = (int(seq_lens[place]) - 1) // self._block_size
                self._join(row, block_tables[place, :num_full].tobytes())
        self._rows, self._tenancies = rows.copy(), tenancies.copy()
        self.latest = self._find()
        return self.latest

    def check_integrity(self) -> None:
        """Raises AssertionError when the index contradicts itself."""
        assert self._keys == sorted(self._keys) == [self._key_of[row] for row in self._order]
        assert sorted(self._order) == sorted(self._rows.tolist()) == sorted(self._key_of)
        assert self._lcps == [*(_common(a, b) for a, b in zip(self._keys, self._keys[1:], strict=False)), 0][: len(self._keys)]

    def _join(self, row: int, key: bytes) -> None:
        place = bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self._order.insert(place, row)
        self._key_of[row] = key
        self._lcps.insert(place, _common(key, self._keys[place + 1]) if place + 1 < len(self._keys) else 0)
        if place:
            self._lcps[place - 1] = _common(self._keys[place - 1], key)

    def _leave(self, row: int) -> None:
        place = bisect_left(self._keys, self._key_of.pop(row))
        while self._order[place] != row:  # others have the same key
            place += 1
        del self._keys[place], self._order[place]
        after = self._lcps.pop(place)
        if place:
            self._lcps[place - 1] = min(self._lcps[place - 1], after)

    def _find(self) -> PrefixGroups | None:
        if not self._lcps or max(self._lcps) * self._block_size < MIN_SHARED_TOKENS:
            return None
        groups = _best_groups([self._tokens(lcp) for lcp in self._lcps])
        groups = sorted(groups, key=lambda group: -group.saved)[:MAX_GROUPS]
        if _saved(groups) < MIN_SAVED_TOKENS:
            return None
        place_of = {row: place for place, row in enumerate(self._rows.tolist())}
        members = [place_of[self._order[place]] for group in groups for place in group.places]
        ends = np.cumsum([len(group.places) for group in groups], dtype=np.int32)
        return PrefixGroups(np.array([group.length for group in groups], np.int32), ends, np.array(members, np.int32))

    def _tokens(self, num_blocks: int) -> int:
        """Of so many common blocks, the tokens that a group may share."""
        tokens = num_blocks * self._block_size // SHARED_MULTIPLE * SHARED_MULTIPLE
        return tokens if tokens >= MIN_SHARED_TOKENS else 0


def _common(a: bytes, b: bytes) -> int:
    """Leading entries of int32 that two tables have in common."""
    if a[:4] != b[:4]:
        return 0
    count = min(len(a), len(b)) // 4
    differs = np.frombuffer(a, np.int32, count) != np.frombuffer(b, np.int32, count)
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count


def _best_groups(shared: Sequence[int]) -> list[_Group]:
    """Groups that save much together; nobody is in two of them.

    Runs of neighbours nest: one that shares more lies within one that shares less. From the inside out each run is taken whole,
    or the groups within it stay and the others of the run are one more.

    Args:
        shared: tokens that each sequence shares with the next; the last is 0.
    """
    # Open runs, each sharing more than the one below: start, tokens, and the groups within it so far.
    stack: list[tuple[int, int, list[_Group]]] = [(0, 0, [])]
    for place, tokens in enumerate(shared):
        start, within = place, list[_Group]()
        while stack[-1][1] > tokens:
            start, length, inner = stack.pop()
            within = _closed(range(start, place + 1), length, inner + within)
        if stack[-1][1] == tokens:
            stack[-1][2].extend(within)
        else:
            stack.append((start, tokens, within))
    return stack[0][2]


def _closed(run: range, length: int, inner: list[_Group]) -> list[_Group]:
    """The groups of a run all of which shares length tokens, given those within that share more."""
    whole = [_Group(run, length)]
    if not inner:
        return whole
    stay = [group for group in inner if group.saved > len(group.places) * length]
    return max(whole, _with_others(run, length, stay), _with_others(run, length, inner), key=_saved)


def _with_others(run: range, length: int, groups: list[_Group]) -> list[_Group]:
    taken = {place for group in groups for place in group.places}
    others = [place for place in run if place not in taken]
    return [*groups, _Group(others, length)] if len(others) > 1 else groups


def _saved(groups: Sequence[_Group]) -> int:
    return sum(group.saved for group in groups)
