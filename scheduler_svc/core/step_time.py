"""How long a step will take, learned from those that ended. Pure: measurements are handed in.

The time of a step is taken as linear in what it computes, with coefficients that drift: a Kalman filter whose state is a random
walk (R. E. Kalman, "A New Approach to Linear Filtering and Prediction Problems", 1960). Errors count relative to the step's
time, because a step of four milliseconds matters as much as one of two hundred.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_UNITS = (1.0, 1.0, 1.0, 1e-3, 1e-6, 1e-2, 1e-5)
"""Of the features, so that their coefficients are of one magnitude."""
MANY_PREFILL_TOKENS = 1024
"""Above, a GPU's step is launched kernel by kernel, which takes a small model longer than the device computes."""
MANY_FEATURE = 2
"""Which of the features says that there are more."""
_PRIOR_VARIANCE = 1.0
_DRIFT = 0.003
"""Standard deviation of a coefficient's change from step to step, relative to it."""
_NOISE_VARIANCE = 0.03**2
"""Of a measured time, relative to it."""
_PLAIN_ERROR = 0.3
"""Relative error above which a measurement is trusted less: something else took the time, a compiler or another process."""
_ERROR_WEIGHT = 0.05
_LEARNED_AFTER = 8


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes.

    Attributes:
        num_prefill_tokens: tokens of chunks of more than one.
        num_attended: pairs of a token of such a chunk and a key that it attends to.
        num_decodes: chunks of one token.
        num_context_tokens: keys that those read.
    """

    num_prefill_tokens: int = 0
    num_attended: int = 0
    num_decodes: int = 0
    num_context_tokens: int = 0

    @property
    def num_sequences_told(self) -> int:
        """About how many streams have news when it ends."""
        return self.num_decodes + (self.num_prefill_tokens > 0)


class StepTimeModel:
    """The times of one executor's steps.

    Attributes:
        relative_error: moving average of |predicted - measured| / measured.
        num_measured: steps learned from.
    """

    def __init__(self) -> None:
        self.relative_error = 0.5
        self.num_measured = 0
        size = range(len(_UNITS))
        self._coefficients = [0.0 for _ in size]
        self._covariance = [[_PRIOR_VARIANCE if i == j else 0.0 for j in size] for i in size]

    @classmethod
    def of(cls, coefficients: Sequence[float]) -> "StepTimeModel":
        """A model that has learned these coefficients somewhere else."""
        model = cls()
        model._coefficients[:] = coefficients
        model.num_measured = _LEARNED_AFTER
        return model

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each feature."""
        return tuple(self._coefficients)

    @property
    def is_learned(self) -> bool:
        """Whether predictions mean anything yet."""
        return self.num_measured >= _LEARNED_AFTER

    def predict_s(self, work: StepWork) -> float:
        """Seconds that a step should take, at least 0."""
        return max(0.0, sum(c * x for c, x in zip(self._coefficients, features(work), strict=True)))

    def learn(self, work: StepWork, seconds: float) -> None:
        """A step took so long."""
        if seconds <= 0:
            return
        coefficients, covariance = self._coefficients, self._covariance
        x = [feature / seconds for feature in features(work)]
        error = 1.0 - sum(c * f for c, f in zip(coefficients, x, strict=True))
        self.relative_error += _ERROR_WEIGHT * (min(1.0, abs(error)) - self.relative_error)
        self.num_measured += 1

        noise = _NOISE_VARIANCE * max(1.0, abs(error) / _PLAIN_ERROR) ** 2
        spread = [sum(p * f for p, f in zip(row, x, strict=True)) for row in covariance]
        scale = 1.0 / (sum(s * f for s, f in zip(spread, x, strict=True)) + noise)
        for i, row in enumerate(covariance):
            gain = spread[i] * scale
            coefficients[i] += gain * error
            for j, s in enumerate(spread):
                row[j] -= gain * s
            row[i] += (_DRIFT * coefficients[i]) ** 2


def features(work: StepWork) -> tuple[float, ...]:
    """What a time is linear in, in units that make the coefficients alike in size."""
    num_tokens = work.num_prefill_tokens
    counts = (
        1,
        num_tokens > 0,
        num_tokens > MANY_PREFILL_TOKENS,
        num_tokens,
        work.num_attended,
        work.num_decodes,
        work.num_context_tokens,
    )
    return tuple(count * unit for count, unit in zip(counts, _UNITS, strict=True))
