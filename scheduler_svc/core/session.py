"""What lasts as long as a session of the executor: the device's blocks, who runs on them, the steps in flight.

Knows sequences and blocks. Does not know requests: who waits outlives a session.
"""

from scheduler_svc.core.batch import Batch
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.outstanding import OutstandingSteps, PlannedStep
from scheduler_svc.core.running_set import RunningSet
from scheduler_svc.core.sequence import Sequence


class Session:
    """See the module's first lines. At first all blocks are free and the executor knows nothing."""

    def __init__(self, config: SchedulerConfig):
        self.pool = BlockPool(config.num_blocks)
        self.outstanding = OutstandingSteps()
        max_running = min(config.max_num_seqs, config.max_num_batched_tokens)  # so that decodes leave room for all
        self.running = RunningSet(self.pool, self.outstanding, config.block_size, max_running)

    def commit(self, batch: Batch) -> PlannedStep:
        """The step is planned: what it computes may be built on by the next."""
        running = self.running
        decodes = running.decodes.advance(batch.step_id, batch.with_blocks)
        step = PlannedStep(batch.step_id, decodes, batch.planned, batch.attached)
        self.outstanding.append(step)
        running.list_blocks(decodes.filling)
        for sequence, num_tokens, is_sampling in batch.planned:
            sequence.note_planned(num_tokens, batch.step_id, is_sampling=is_sampling)
            if num_tokens == 1:
                sequence.account.note_decode()
            running.list_blocks([sequence])
            running.settle(sequence)
        return step

    def void(self, sequence: Sequence) -> None:
        """Steps in flight of a sequence that does not run do not count any more."""
        self.outstanding.void(sequence)
        sequence.void_steps()
