"""Which blocks are worth writing to a lower tier: those that somebody asked for again. Knows keys; not bytes, tiers or time.

A touch is a commit (or the try to write what is there already), a look-up that finds the block, an acquisition, or a client's
word that it has the block on its device and uses it.
The first turn of a chat is committed once; its second turn looks its history up, and that is the second touch: a history
goes down when it is used again, a prompt that nobody asks twice never does. Keys are remembered after their block was
evicted, so that a block that has to be computed a second time goes down with its second commit.
"""

from collections import OrderedDict
from collections.abc import Iterable

from common.ids import BlockKey


class Admission:
    """Counts touches of each key.

    Args:
        num_touches: so many make a block worth writing; 1: every block is.
        max_keys: keys to remember; the one that was not touched for longest is forgotten first.
    """

    def __init__(self, num_touches: int, max_keys: int):
        self._num_touches = num_touches
        self._max_keys = max_keys
        self._counts: OrderedDict[BlockKey, int] = OrderedDict()

    def touch(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Counts one touch of each; returns those that are worth writing by now, in the same order."""
        counts, enough = self._counts, self._num_touches
        worthy = []
        for key in keys:
            count = counts.get(key, 0)
            if count < enough:
                count += 1
            counts[key] = count
            counts.move_to_end(key)
            if count >= enough:
                worthy.append(key)
        while len(counts) > self._max_keys:
            counts.popitem(last=False)
        return worthy

    @property
    def num_keys(self) -> int:
        """Keys that are remembered."""
        return len(self._counts)
