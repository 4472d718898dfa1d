"""Loads by the second, drawn with a seed."""

import math
import random
from collections.abc import Callable


def poisson(rng: random.Random, mean: float) -> int:
    """How many come in a second (Knuth's way, for small means)."""
    limit, product, count = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count


def counts(num_seconds: int, rate: Callable[[int], float], seed: int = 0) -> list[int]:
    """Counts of a load whose rate is a function of the second."""
    rng = random.Random(seed)
    return [poisson(rng, rate(second)) for second in range(num_seconds)]
