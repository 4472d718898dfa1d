"""How a GPU's memory is divided: what weights leave, less scratch, graphs and slots, is the KV pool. Knows arithmetic only."""

from dataclasses import dataclass

from common.errors import StartupError

MAX_BLOCKS = 1 << 18
"""More blocks than any batch uses, of models so small that the pool would be millions of them."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose.

    Attributes:
        total: of the device.
        used: taken when the plan is made: weights, and whatever else runs on the device.
        scratch: most that one step takes beside that.
        graphs: set aside for CUDA graphs.
        slots: of blocks on their way below the device in a smaller form (cuda/stored_blocks.py).
    """

    total: int
    used: int
    scratch: int
    graphs: int
    slots: int = 0

    @property
    def left(self) -> int:
        """Bytes of the device that nothing else takes."""
        return self.total - self.used - self.scratch - self.graphs - self.slots

    def num_blocks(self, block_bytes: int, utilization: float, *, asked_blocks: int, asked_bytes: int) -> int:
        """Blocks of the KV pool.

        Args:
            block_bytes: of one block.
            utilization: share of total that everything together may take.
            asked_blocks: of the settings; 0: not said.
            asked_bytes: of the settings; 0: not said.

        Raises:
            StartupError: there is no room for a block, or not for what is asked.
        """
        budget = self.left - (self.total - int(self.total * utilization))
        found = asked_blocks or (asked_bytes or budget) // block_bytes
        if not asked_blocks and not asked_bytes:
            found = min(found, MAX_BLOCKS)
        if found < 1 or found * block_bytes > self.left:
            form = f", blocks in their stored form {self.slots:,}" if self.slots else ""
            raise StartupError(
                f"no room for a KV pool of {max(found, 1):,} blocks of {block_bytes:,} bytes: the device has {self.total:,}, "
                f"{self.used:,} are used, a step takes up to {self.scratch:,}, graphs {self.graphs:,}{form}; raise "
                "--gpu-memory-utilization, or lower --num-blocks, --kv-memory-bytes, --max-num-batched-tokens or --max-num-seqs"
            )
        return found
