"""What a waiting sequence can take over instead of computing it: blocks of its prefix on the device. Pure look-up.

At least one token has to be computed, because only a computed position yields a next token. When everything is there, the
last block is copied and its last token computed in the copy: a block that others read is never written.

    fork of a sample     |== shared full blocks ==|-- copied, partly filled --|x     x: the prompt's last token, computed again
    whole prompt listed  |== shared full blocks ==|-- copied, full -----------x|
    part of it listed    |== shared full blocks ==|.......... computed ..........
"""

from collections.abc import Iterable
from dataclasses import dataclass

from common.ids import BlockId, BlockKey
from scheduler_svc.core.prefix_index import PrefixIndex
from scheduler_svc.core.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Attachment:
    """A prefix to take over.

    Attributes:
        shared: full blocks, in order of position.
        copy_source: the block behind them, to be copied.
        num_tokens: how many tokens need not be computed.
    """

    shared: list[BlockId]
    copy_source: BlockId | None
    num_tokens: int

    def without_copy(self, block_size: int) -> "Attachment":
        """The part that needs no extra block."""
        return Attachment(self.shared, None, len(self.shared) * block_size)


@dataclass(frozen=True, slots=True)
class Awaited:
    """Others compute the next part right now: waiting for it is better than computing it twice.

    Attributes:
        key: of the block; None: it is the prompt of a sibling.
    """

    key: BlockKey | None


def find_attachment(sequence: Sequence, siblings: Iterable[Sequence], index: PrefixIndex) -> Attachment | Awaited:
    """Looks for a sequence's prefix.

    Args:
        sequence: waiting, with no step in flight.
        siblings: samples of the same request that have not ended.
        index: of the device.
    """
    num_tokens = len(sequence.token_ids)
    if num_tokens == sequence.num_prompt_tokens:
        running = [sibling for sibling in siblings if sibling.status is SequenceStatus.RUNNING]
        for sibling in running:
            if sibling.num_planned_tokens >= num_tokens:
                return _take_over(sibling.table.block_ids, num_tokens, sequence.table.block_size)
        if running:
            return Awaited(None)
    block_ids = index.match(sequence.keys)
    if len(block_ids) < len(sequence.keys):
        key = sequence.keys[len(block_ids)]
        if index.is_promised(key):
            return Awaited(key)
    return _take_over(block_ids, min(num_tokens, len(block_ids) * sequence.table.block_size + 1), sequence.table.block_size)


def _take_over(block_ids: list[BlockId], num_tokens: int, block_size: int) -> Attachment:
    """All but the last of num_tokens tokens, which are in block_ids or one beyond."""
    num_shared, num_copied = divmod(num_tokens - 1, block_size)
    return Attachment(block_ids[:num_shared], block_ids[num_shared] if num_copied else None, num_tokens - 1)
