"""A whole load into a sink, one group."""

from collections.abc import Sequence
from contextlib import closing

from executor_svc.core.host_block import BlockSink, HostBlock


def filled(sink: BlockSink, blocks: Sequence[HostBlock]) -> list[bool]:
    """The verdicts on all blocks."""
    found: list[bool] = []
    with closing(sink.begin()) as filling:
        filling.add(blocks)
        while filling.is_under_way:
            found += filling.verdicts()
    return found
