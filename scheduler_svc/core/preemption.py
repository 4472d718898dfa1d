"""Who has to give up its blocks when the pool is empty. Pure choice.

A sequence that needs a block may take those of sequences that arrived after it, never of older ones. Among the younger half of
them the one with the least computed tokens loses: its work is recomputed later, and much of it may still be cached then. A
sequence that was preempted is protected until it has got another token.

Why this ends: everything a running sequence needs to get its next token was allocated when it was admitted, so a protected one
gets on and loses the protection. While somebody is short of blocks none is free, and nobody is admitted. So the oldest
sequence, which nobody can preempt, finds either a victim or, after finitely many steps, no other sequence in the pool; and
the pool holds any one sequence alone. It ends, and the next is the oldest.
"""

from collections.abc import Sequence as Seq

from scheduler_svc.core.sequence import Sequence


def choose_victim(younger: Seq[Sequence]) -> Sequence | None:
    """The sequence to preempt.

    Args:
        younger: running sequences behind the one that needs a block, in order of arrival.

    Returns:
        None: all are protected; the needy one waits.
    """
    candidates = [sequence for sequence in younger if not sequence.is_protected]
    youngest_half = candidates[len(candidates) // 2 :]
    return min(reversed(youngest_half), key=lambda sequence: sequence.num_planned_tokens, default=None)
