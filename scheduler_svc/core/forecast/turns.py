"""Which conversations will probably go on, and when. Pure: keys and the time are handed in.

A prompt that begins with the whole prompt of an earlier request is the next turn of its conversation. How many come again, and
after how long, is learned from those that did.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from common.ids import BlockKey
from scheduler_svc.core.forecast.gaps import Gaps

_MAX_CONVERSATIONS = 1024
_GIVEN_UP_AFTER_S = 3600.0
_LEARNED_AFTER = 8
_WEIGHT = 0.01
"""Of the newest conversation in the share of those that come again."""


@dataclass(slots=True, eq=False)
class Conversation:
    """One that may go on.

    Attributes:
        keys: of the full blocks of its last prompt.
        ended_at_s: when its last answer was complete.
        warmed_blocks: that were brought up for its next turn.
    """

    keys: tuple[BlockKey, ...]
    ended_at_s: float
    warmed_blocks: int = 0


class Turns:
    """See the module's first lines.

    Attributes:
        num_warm_used, num_warm_unused: conversations whose blocks were brought up, and that went on, or did not.
    """

    def __init__(self) -> None:
        self.num_warm_used = 0
        self.num_warm_unused = 0
        self._gaps = Gaps()
        self._share_that_returns = 0.5
        self._by_last_key: OrderedDict[BlockKey, Conversation] = OrderedDict()

    @property
    def num_warm_blocks(self) -> int:
        """Blocks that were brought up for turns that have not come."""
        return sum(conversation.warmed_blocks for conversation in self._by_last_key.values())

    def note_arrival(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """A request with a prompt of these full blocks came."""
        for key in reversed(keys):
            conversation = self._by_last_key.pop(key, None)
            if conversation is not None:
                self._gaps.learn(now_s - conversation.ended_at_s)
                self._share_that_returns += _WEIGHT * (1.0 - self._share_that_returns)
                self.num_warm_used += conversation.warmed_blocks > 0
                return

    def note_end(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """A request with a prompt of these full blocks has got its answer."""
        if not keys:
            return
        self._by_last_key.pop(keys[-1], None)
        self._by_last_key[keys[-1]] = Conversation(tuple(keys), now_s)
        while self._by_last_key and self._is_stale(now_s):
            _, conversation = self._by_last_key.popitem(last=False)
            self._share_that_returns -= _WEIGHT * self._share_that_returns
            self.num_warm_unused += conversation.warmed_blocks > 0

    def expected(self, now_s: float, window_s: float, least_probability: float) -> list[Conversation]:
        """Conversations that go on within the window at least with this probability, those that are expected first in front.

        What was brought up for one that is not expected any more counts as gone.
        """
        if self._gaps.num_learned < _LEARNED_AFTER:
            return []
        found = []
        for conversation in self._by_last_key.values():
            age_s = now_s - conversation.ended_at_s
            by_now = self._gaps.share_within(age_s)
            soon = self._gaps.share_within(age_s + window_s) - by_now
            returns = self._share_that_returns
            if returns * soon >= least_probability * (1.0 - returns * by_now):
                middle_s = self._gaps.quantile_s(by_now + 0.5 * (1.0 - by_now))
                found.append((middle_s - age_s, conversation))
            elif conversation.warmed_blocks:
                conversation.warmed_blocks = 0
                self.num_warm_unused += 1
        found.sort(key=lambda entry: entry[0])
        return [conversation for _, conversation in found]

    def _is_stale(self, now_s: float) -> bool:
        oldest = next(iter(self._by_last_key.values()))
        return len(self._by_last_key) > _MAX_CONVERSATIONS or now_s - oldest.ended_at_s > _GIVEN_UP_AFTER_S
