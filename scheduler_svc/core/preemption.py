"""Who has to give up its place when room runs out. Pure choice.

Running sequences have a rank that does not change while they run: tier first, then arrival. A sequence that needs room may take
it from those behind it in rank, never from those ahead. Of them the least urgent tier loses, there among the younger half the
one whose loss costs least. A sequence that was preempted is protected until it has got another token, and each preemption that it
suffered makes the next one count as dearer: nobody is moved out and in for ever while others are there.

Why this ends, for one that runs and needs a block: everything a running sequence needs to get its next token was allocated when
it was admitted, so a protected one gets on and loses the protection. While somebody is short of blocks none is free, and nobody
is admitted, except by taking room from a tier behind its own; whoever is ahead of that tier would have taken that room already,
so nobody ahead waits longer for it. So the first in rank, which nobody can preempt, finds either a victim or, after finitely
many steps, no other sequence in the pool; and the pool holds any one sequence alone. It ends, and the next is the first.

Why this ends, for one that waits: it makes room once, at the moment at which it is admitted, and only as much as it needs; a
tier takes from tiers behind it alone, so there is no circle. That new ones ahead of it come again and again is the policy's
to bound (fair_share.py does by ageing: who has waited too long runs in the first tier).
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from scheduler_svc.core.sequence import Sequence

Cost = Callable[[Sequence], float]
"""What it costs to preempt a sequence, at least 0."""


STORED_TOKEN = 0.1
"""What a token costs that was offered to the store, or shared from the start: to load, or to find again, and not to compute."""


def lost_tokens(sequence: Sequence) -> float:
    """Tokens that have to be computed again, and a little for those that probably need not."""
    num_stored = sequence.num_offered * sequence.table.block_size
    return sequence.num_planned_tokens - (1.0 - STORED_TOKEN) * num_stored


def choose_victim(candidates: Seq[Sequence], cost: Cost = lost_tokens) -> Sequence | None:
    """The sequence to preempt.

    Args:
        candidates: running sequences behind the one that needs room, in order of rank.
        cost: of preempting one.

    Returns:
        None: all are protected; the needy one waits.
    """
    free = [sequence for sequence in candidates if not sequence.is_protected]
    if not free:
        return None
    last_tier = free[-1].tier
    free = [sequence for sequence in free if sequence.tier == last_tier]
    youngest_half = free[len(free) // 2 :]
    return min(reversed(youngest_half), key=lambda sequence: cost(sequence) * (1 + sequence.num_preemptions))
