"""A request inside the scheduler: its samples and what is reported about it. Knows no block."""

from dataclasses import dataclass, field

from common.ids import BlockKey
from scheduler_svc.core.request import Request
from scheduler_svc.core.sequence import Sequence, SequenceStatus


@dataclass(slots=True, eq=False)
class RequestState:
    """See the module's first line.

    Attributes:
        sequences: its samples that have not ended, in order of index.
        prompt_keys: of the prompt's full blocks; empty without prefix caching.
        load_id: of the load from the store that it waits for.
        admitted_at_s: when its first sample was admitted.
        has_loaded: a load has ended for it, and it was not admitted since.
        loaded_by_tier: tokens that a load brought to the device for it.
        cached_by_tier: prompt tokens that its first admission did not have to compute.
    """

    request: Request
    sequences: list[Sequence]
    prompt_keys: list[BlockKey]
    load_id: int | None = None
    has_loaded: bool = False
    admitted_at_s: float | None = None
    loaded_by_tier: dict[str, int] = field(default_factory=dict)
    cached_by_tier: dict[str, int] = field(default_factory=dict)

    @property
    def is_queued(self) -> bool:
        """Whether no sample was ever admitted."""
        return self.admitted_at_s is None

    @property
    def waits_whole(self) -> bool:
        """Whether blocks can be loaded for all of it: it is queued, or its only sample lost its place."""
        return self.is_queued or (len(self.sequences) == 1 and self.sequences[0].status is SequenceStatus.WAITING)

    @property
    def waiting_keys(self) -> list[BlockKey]:
        """Of the full blocks that may be loaded while it waits whole: at least one known token has to be computed."""
        if self.is_queued:
            num_tokens, keys = len(self.request.prompt_token_ids), self.prompt_keys
        else:
            num_tokens, keys = len(self.sequences[0].token_ids), self.sequences[0].keys
        return keys[: (num_tokens - 1) // self.sequences[0].table.block_size]

    def note_admission(self, now_s: float, num_cached_tokens: int) -> None:
        """The first sample was admitted with so many prompt tokens that it need not compute."""
        self.admitted_at_s = now_s
        remaining = num_cached_tokens
        for tier, num_loaded in self.loaded_by_tier.items():
            num_tokens = min(num_loaded, remaining)
            if num_tokens:
                self.cached_by_tier[tier] = num_tokens
            remaining -= num_tokens
        if remaining:
            self.cached_by_tier = {"device": remaining, **self.cached_by_tier}
