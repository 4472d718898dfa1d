"""How far each expert is trusted: by how well it did lately. Knows losses, not what is forecast.

The weight of an expert is the likelihood of what came if it were right, with normal errors of unknown spread: its mean squared
error to the power of -n/2, n being how many independent outcomes there were. So the best ones take over after a few outcomes,
whatever the scale of the errors, and without a rate of learning to be tuned. Losses fade, so that weights follow when the
load changes its nature: the tracking of the best expert (Herbster and Warmuth, 1998) by forgetting.
"""

import math
from collections.abc import Sequence

_HALF_LIFE_S = 600.0
_LEAST_LOSS = 1e-9


class Mixture:
    """See the module's first lines.

    Args:
        num_experts: at least 1.
        overlap: how many successive outcomes tell as much as one, because they share most of their time.
    """

    def __init__(self, num_experts: int, overlap: float):
        self._losses = [_LEAST_LOSS] * num_experts
        self._overlap = overlap
        self._num_outcomes = 0.0
        self._keep = 0.5 ** (1.0 / _HALF_LIFE_S)

    def learn(self, errors: Sequence[float]) -> None:
        """One second's outcome is known.

        Args:
            errors: of each expert, in a unit in which large and small loads err alike.
        """
        keep = self._keep
        self._losses = [keep * loss + error * error for loss, error in zip(self._losses, errors, strict=True)]
        self._num_outcomes = keep * self._num_outcomes + 1.0

    def weights(self) -> list[float]:
        """Of each expert; they add up to 1."""
        power = -0.5 * self._num_outcomes / self._overlap
        least = min(self._losses)
        weights = [math.exp(power * math.log(loss / least)) for loss in self._losses]
        total = sum(weights)
        return [weight / total for weight in weights]
