"""What one payer uses, as plain counters: the places that hand things out count, a policy turns the counts into an order."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Account:
    """See the module's first line.

    Attributes:
        num_running: sequences in the batch.
        num_blocks: device blocks in their tables; a block counts for each table that has it.
        num_decodes: chunks of one token that were planned since the start.
    """

    num_running: int = 0
    num_blocks: int = 0
    num_decodes: int = 0
