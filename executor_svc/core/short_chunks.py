"""Short chunks behind long contexts, as single tokens: what is left of a prompt whose blocks are there already.

A kernel for chunks walks over the context once for each few queries, on one processor: behind 16,000 tokens that takes longer
than the rest of the step. Kernels for decodes divide the context among all processors, and read what a group of decodes shares
once. Tokens of one chunk share everything before it. All keys of a step are written before any is read, so each token sees what
it saw as part of the chunk.

Knows chunks and groups; no tokens, no tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from executor_svc.core.batch import ScheduledChunk
from executor_svc.core.plan import SamplingT
from executor_svc.core.prefix_groups import MAX_GROUPS, MIN_SAVED_TOKENS, NO_GROUPS, SHARED_MULTIPLE, PrefixGroups

MAX_TOKENS = 32
"""Of a chunk: more are enough work for several processors."""
MIN_CONTEXT_TOKENS = 4096
"""From here on even decodes that do not share take less time."""


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk that was divided.

    Attributes:
        start, stop: places of its tokens among the decodes.
        shared: tokens in front of it, a multiple of SHARED_MULTIPLE.
    """

    start: int
    stop: int
    shared: int

    @property
    def saved(self) -> int:
        """Tokens that a group need not read twice."""
        return (self.stop - self.start - 1) * self.shared


@dataclass(frozen=True, slots=True)
class DividedStep(Generic[SamplingT]):
    """The chunks of a step in packed order.

    Attributes:
        chunks: decodes, then single tokens of divided chunks, then the other chunks.
        num_decodes: of those, the decodes.
        spans: the divided chunks.
    """

    chunks: Sequence[ScheduledChunk[SamplingT]]
    num_decodes: int
    spans: Sequence[Span]

    def groups(self, of_decodes: PrefixGroups | None) -> PrefixGroups | None:
        """The groups of decodes and, if they are worth it, those of divided chunks; None: none are.

        Args:
            of_decodes: those that the decodes have among themselves.
        """
        spans = sorted(self.spans, key=lambda span: -span.saved)
        if of_decodes is None and sum(span.saved for span in spans) < MIN_SAVED_TOKENS:
            return None
        groups = of_decodes or NO_GROUPS
        for span in spans[: MAX_GROUPS - len(groups.lens)]:
            members = np.arange(span.start, span.stop, dtype=np.int32)
            groups = PrefixGroups(
                np.append(groups.lens, np.int32(span.shared)),
                np.append(groups.ends, np.int32(len(groups.members) + len(members))),
                np.append(groups.members, members),
            )
        return groups


def divide(chunks: Sequence[ScheduledChunk[SamplingT]], max_decodes: int) -> DividedStep[SamplingT]:
    """Divides what is short and far behind, as long as all single tokens together are not more than max_decodes."""
    decodes = [chunk for chunk in chunks if chunk.stop - chunk.start == 1]
    others: list[ScheduledChunk[SamplingT]] = []
    tokens: list[ScheduledChunk[SamplingT]] = []
    spans: list[Span] = []
    for chunk in chunks:
        num_tokens = chunk.stop - chunk.start
        if num_tokens == 1:
            continue
        place = len(decodes) + len(tokens)
        if num_tokens > MAX_TOKENS or chunk.start < MIN_CONTEXT_TOKENS or place + num_tokens > max_decodes:
            others.append(chunk)
            continue
        tokens += (
            replace(chunk, start=at, stop=at + 1, samples=chunk.samples and at + 1 == chunk.stop)
            for at in range(chunk.start, chunk.stop)
        )
        spans.append(Span(place, place + num_tokens, chunk.start // SHARED_MULTIPLE * SHARED_MULTIPLE))
    return DividedStep([*decodes, *tokens, *others], len(decodes), spans)
