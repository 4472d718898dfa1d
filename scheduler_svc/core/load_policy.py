"""Whether stored blocks are loaded or computed again, by the rates measured so far. Pure: measurements are handed in.

Loading n blocks is worth it when it takes less time than computing their tokens. Both rates are moving averages. Before
anything is measured, loading is tried; afterwards a losing load is still tried once in a while, because a tier that was slow
once would otherwise never be measured again.
"""

_WEIGHT = 0.2
_PROBE_EVERY = 16


class LoadPolicy:
    """Rates of one executor.

    Attributes:
        load_bytes_per_s: of loads from the store; None: not measured.
        prefill_tokens_per_s: of steps; None: not measured.
    """

    def __init__(self, block_bytes: int, block_size: int):
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._num_declined = 0
        self.load_bytes_per_s: float | None = None
        self.prefill_tokens_per_s: float | None = None

    def note_load(self, num_blocks: int, seconds: float) -> None:
        """A load ended."""
        if num_blocks and seconds > 0:
            self.load_bytes_per_s = _average(self.load_bytes_per_s, num_blocks * self._block_bytes / seconds)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step that was mostly prefill ended."""
        if num_tokens and seconds > 0:
            self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, num_tokens / seconds)

    def should_load(self, num_blocks: int) -> bool:
        """Whether to load this many blocks."""
        if num_blocks == 0:
            return False
        if self.load_bytes_per_s is None or self.prefill_tokens_per_s is None:
            return True
        load_s = num_blocks * self._block_bytes / self.load_bytes_per_s
        compute_s = num_blocks * self._block_size / self.prefill_tokens_per_s
        if load_s < compute_s:
            return True
        self._num_declined += 1
        return self._num_declined % _PROBE_EVERY == 0


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
