"""What a step's result brought, for the edge. Most of it is a token for each of many sequences: that is kept in two columns."""

from collections.abc import Iterator

from common.ids import SeqId
from scheduler_svc.core.plan import SampleId, SequenceUpdate


class StepUpdates:
    """See the module's first line. Iterating gives all of it as updates, in the order of the plan; failures come last.

    Attributes:
        samples, token_ids: a token for each sequence that got one, in the order of the plan.
        ended: of those, whose last token it was: the update that says so.
        failed: sequences that failed.
    """

    __slots__ = ("ended", "failed", "samples", "token_ids")

    def __init__(self) -> None:
        self.samples: list[SampleId] = []
        self.token_ids: list[int] = []
        self.ended: dict[SeqId, SequenceUpdate] = {}
        self.failed: list[SequenceUpdate] = []

    def __iter__(self) -> Iterator[SequenceUpdate]:
        for sample, token_id in zip(self.samples, self.token_ids, strict=True):
            yield self.update_of(sample, token_id)
        yield from self.failed

    def update_of(self, sample: SampleId, token_id: int) -> SequenceUpdate:
        """A token of a sample as an update."""
        return self.ended.get(sample.seq_id) or SequenceUpdate(sample.request_id, sample.seq_id, sample.index, (token_id,))
