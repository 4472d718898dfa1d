"""Finds stop strings in text that comes in pieces. Knows characters only; one instance a sequence.

The first moment at which the text contains a stop string counts, wherever the borders of the pieces are; of several strings
that end on the same character, the longest. Text that may be the beginning of a stop string is held back.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found.

    Attributes:
        stop_str: which.
        text: what may go out: text before it, and the string itself if it is kept.
    """

    stop_str: str
    text: str


class StopPatterns:
    """The stop strings of a request, prepared once for its samples."""

    def __init__(self, stop: Sequence[str], *, keep: bool = False):
        self.keep = keep
        self.patterns = [(text, _borders(text)) for text in sorted(stop, key=len, reverse=True)]


class StopMatcher:
    """Watches one sequence. The work is linear in its characters (Knuth, Morris and Pratt)."""

    def __init__(self, patterns: StopPatterns):
        self._keep = patterns.keep
        self._patterns = patterns.patterns
        # How many characters of each pattern the text ends with.
        self._matched = [0] * len(self._patterns)
        self._held = ""

    def push(self, text: str) -> str | StopMatch:
        """The text that may go out after this piece, or the match that ends the sequence."""
        if not self._patterns:
            return text
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            for i, (pattern, borders) in enumerate(self._patterns):
                matched = self._matched[i]
                while matched and pattern[matched] != buffer[position]:
                    matched = borders[matched - 1]
                if pattern[matched] == buffer[position]:
                    matched += 1
                if matched == len(pattern):
                    end = position + 1
                    return StopMatch(pattern, buffer[: end if self._keep else end - matched])
                self._matched[i] = matched
        num_held = max(self._matched)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held]

    def flush(self) -> str:
        """The held text, when the sequence ended otherwise."""
        held, self._held = self._held, ""
        return held


def _borders(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        borders[i] = length
    return borders
