"""The text of one sample as its tokens come: detokenised, watched for stop strings. Knows no wire and no scheduler."""

from collections.abc import Sequence

from scheduler_svc.text.detokenizer import Detokenizer
from scheduler_svc.text.stop_strings import StopMatch, StopMatcher


class SampleText:
    """Text out of tokens.

    Attributes:
        matched_stop: the stop string that ended the text; None so far.
        num_tokens: how many tokens the sample has; those after a stop string do not count.
    """

    def __init__(self, detokenizer: Detokenizer | None, matcher: StopMatcher, *, min_tokens: int = 0):
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens
        self.matched_stop: str | None = None
        self.num_tokens = 0

    def push(self, token_id: int) -> str:
        """The text that may go out after this token. After a match: nothing more must be pushed."""
        self.num_tokens += 1
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(token_id)
        # Stop strings count from min_tokens on, like stop tokens.
        return self._watch(text) if self.num_tokens >= self._min_tokens else text

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        """The rest of the text, when the sequence ended by its tokens.

        Args:
            token_ids: tokens whose text is wanted no more, a stop token for example; they only count.
        """
        self.num_tokens += len(token_ids)
        if self._detokenizer is None:
            return ""
        text = self._watch(self._detokenizer.flush())
        return text if self.matched_stop is not None else text + self._matcher.flush()

    def _watch(self, text: str) -> str:
        found = self._matcher.push(text)
        if isinstance(found, StopMatch):
            self.matched_stop = found.stop_str
            return found.text
        return found
