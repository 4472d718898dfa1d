"""When new full blocks are written to the store. Pure: counts and times are handed in.

A save costs two calls to the store, whatever it saves, so blocks gather. Where a copy takes time from computing, because there is
no engine for copies beside the cores, they also wait for a quiet moment: until nothing runs, or for so long, or until there are
so many, that losing them would cost more than the copy. Nothing waits when more blocks are expected to be taken soon than can be
taken without losing what was not saved.
"""

from dataclasses import dataclass

BLOCKS_PER_SAVE = 64


@dataclass(frozen=True, slots=True)
class SaveLimits:
    """When blocks have gathered.

    Attributes:
        num_blocks: so many are enough.
        delay_s: so long after the first.
        at_rest: as soon as no step is under way.
    """

    num_blocks: int
    delay_s: float
    at_rest: bool

    @classmethod
    def of(cls, num_device_blocks: int, *, copies_compete: bool) -> "SaveLimits":
        """The limits for an executor.

        Args:
            num_device_blocks: of its pool.
            copies_compete: whether copies take time from computing.
        """
        if copies_compete:
            return cls(max(BLOCKS_PER_SAVE, num_device_blocks // 2), 10.0, at_rest=True)
        return cls(BLOCKS_PER_SAVE, 0.5, at_rest=False)


class SavePolicy:
    """Decides for one executor. Once blocks have gathered, all of them go out."""

    def __init__(self, limits: SaveLimits):
        self._limits = limits
        self._first_at_s: float | None = None
        self._is_writing = False
        self._is_room_short = False

    def expect(self, num_blocks: float, num_clean_blocks: int) -> None:
        """How many blocks will be taken soon.

        Args:
            num_blocks: probably not more than these.
            num_clean_blocks: that can be taken without losing anything.
        """
        self._is_room_short = num_blocks > num_clean_blocks

    def should_save(self, num_unsaved: int, num_outstanding_steps: int, now_s: float) -> bool:
        """Whether the next save goes out now.

        Args:
            num_unsaved: blocks that wait.
            num_outstanding_steps: steps that are under way.
            now_s: the time.
        """
        if num_unsaved == 0:
            self._first_at_s, self._is_writing = None, False
            return False
        if self._first_at_s is None:
            self._first_at_s = now_s
        self._is_writing = (
            self._is_writing
            or self._is_room_short
            or num_unsaved >= self._limits.num_blocks
            or now_s >= self._first_at_s + self._limits.delay_s
            or (self._limits.at_rest and num_outstanding_steps == 0)
        )
        return self._is_writing

    @property
    def due_s(self) -> float | None:
        """When waiting blocks are written at the latest; None: none wait."""
        return None if self._first_at_s is None or self._is_writing else self._first_at_s + self._limits.delay_s
