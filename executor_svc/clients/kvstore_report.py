"""What the block store client says it did. Data only."""

from dataclasses import dataclass, field

from octavo.kvstore.v1 import kv_store_service_pb2 as pb

OUT_OF_TIME = "the time was over"
CORRUPT = "bytes differ from their checksum"
TIER_NAMES = {pb.TIER_SHM: "shm", pb.TIER_DISK: "disk", pb.TIER_REDIS: "redis"}


@dataclass
class SaveReport:
    """What became of the blocks of one save.

    Attributes:
        num_written: new in the store.
        num_present: there already, or being written by another client.
        num_failed: not in the store.
        reason: why, for one of the failed; empty if there are none.
    """

    num_written: int = 0
    num_present: int = 0
    num_failed: int = 0
    reason: str = ""


@dataclass
class TierReading:
    """How one tier did in a load.

    Attributes:
        tier: its name; empty: the wait for a block that did not come.
        num_blocks: that it had.
        first_s: time to the first of them, from the block before.
        seconds: time to each of them, from the block before, in all.
    """

    tier: str
    num_blocks: int
    first_s: float
    seconds: float


@dataclass
class LoadReport:
    """What became of the blocks of one load.

    Attributes:
        num_loaded: leading blocks whose bytes are verified; what is in the buffers of the others is undefined.
        num_by_tier: of them, by the tier they were found in.
        reason: why it is not all; empty if it is.
        seconds: that it took.
        readings: the same by tier, with times.
    """

    num_loaded: int = 0
    num_by_tier: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0
    readings: list[TierReading] = field(default_factory=list)

    def add(self, tier: str, seconds: float, num_blocks: int = 1) -> None:
        """More leading blocks are loaded, all of them so long after those before."""
        self.num_loaded += num_blocks
        self.num_by_tier[tier] = self.num_by_tier.get(tier, 0) + num_blocks
        self._read(TierReading(tier, num_blocks, seconds, seconds))

    def waited(self, seconds: float) -> None:
        """The next block did not come in this time."""
        self._read(TierReading("", 0, seconds, seconds))

    def _read(self, reading: TierReading) -> None:
        for known in self.readings:
            if known.tier == reading.tier:
                known.num_blocks += reading.num_blocks
                known.seconds += reading.seconds
                return
        self.readings.append(reading)
