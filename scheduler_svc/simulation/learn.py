"""A device's profile from the steps of a recording. Pure.

The coefficients are those of relative least squares over all steps: a model that only follows the last steps, as the scheduler's
own does, would not know the others. None is below zero, because all are times of work, but the one of steps with many prompt
tokens: those are computed another way, which may be the quicker one.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from scheduler_svc.core.step_time import MANY_FEATURE, MANY_PREFILL_TOKENS, StepTimeModel, StepWork, features
from scheduler_svc.simulation.profile import DeviceProfile
from scheduler_svc.simulation.recorded import MeasuredStep, RecordedRun

_NUM_KEPT = 200
_IN_TIME_S = 0.005
"""Before the end of the step ahead: a plan that was sent by then is no reason for waiting."""
_WARM_UP_STEPS = 3
_ROUNDS = 4


def learn_profile(run: RecordedRun, name: str) -> DeviceProfile:
    """What executes like the executor of a recording."""
    steps = [step for step in run.steps[_WARM_UP_STEPS:] if step.seconds > 0] or run.steps
    coefficients = fit(steps)
    model = StepTimeModel.of(coefficients)
    overheads = [step.ended_s - step.sent_s - step.seconds for step in steps if step.was_alone]
    pairs = [(before, after) for before, after in itertools.pairwise(steps) if not after.was_alone]
    start = run.start

    def ratios(is_of: Callable[[StepWork], bool]) -> tuple[float, ...]:
        return _ratios(model, [step for step in steps if is_of(step.work)])

    return DeviceProfile(
        name=name,
        coefficients=coefficients,
        decode_ratios=ratios(lambda work: work.num_prefill_tokens == 0),
        short_prefill_ratios=ratios(lambda work: 0 < work.num_prefill_tokens <= MANY_PREFILL_TOKENS),
        prefill_ratios=ratios(lambda work: work.num_prefill_tokens > MANY_PREFILL_TOKENS),
        round_trip_s=max(0.0, statistics.median(overheads)) if overheads else 0.001,
        between_steps_s=_between_steps_s(pairs),
        hitches_s=_hitches_s(pairs),
        num_blocks=start.num_blocks,
        block_size=start.block_size,
        max_num_seqs=start.max_num_seqs,
        max_num_batched_tokens=start.max_num_batched_tokens,
    )


def _between_steps_s(pairs: Sequence[tuple[MeasuredStep, MeasuredStep]]) -> float:
    """What passes between the results of two steps, beside the second one's own time and its waiting; the mean."""
    gaps = [after.ended_s - before.ended_s - after.seconds - after.idle_s for before, after in pairs]
    return max(0.0, statistics.fmean(gaps)) if gaps else 0.0


def _hitches_s(pairs: Iterable[tuple[MeasuredStep, MeasuredStep]]) -> tuple[float, ...]:
    """Of the steps whose plans were there in time."""
    return _spread(after.idle_s for before, after in pairs if after.sent_s < before.ended_s - _IN_TIME_S) or (0.0,)


def _ratios(model: StepTimeModel, steps: Sequence[MeasuredStep]) -> tuple[float, ...]:
    """Measured to predicted times."""
    return _spread([step.seconds / max(1e-9, model.predict_s(step.work)) for step in steps]) or (1.0,)


def _spread(values: Iterable[float]) -> tuple[float, ...]:
    """As many as are kept, evenly over their distribution."""
    ordered = sorted(values)
    if len(ordered) <= _NUM_KEPT:
        return tuple(ordered)
    return tuple(ordered[int((i + 0.5) * len(ordered) / _NUM_KEPT)] for i in range(_NUM_KEPT))


def fit(steps: Sequence[MeasuredStep]) -> tuple[float, ...]:
    """Coefficients of StepTimeModel for measured steps; outliers count less."""
    seconds = np.array([step.seconds for step in steps])
    x = np.array([features(step.work) for step in steps]) / seconds[:, None]
    weights = np.ones(len(steps))
    solution = np.zeros(x.shape[1])
    for _ in range(_ROUNDS):
        solution = _non_negative(x * weights[:, None], weights)
        error = np.abs(x @ solution - 1)
        weights = 1 / np.maximum(1.0, error / max(1e-6, 2 * float(np.median(error))))
    return tuple(float(value) for value in solution)


def _non_negative(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least squares without negative coefficients, see above: those that come out so are left out, the worst first."""
    used = list(range(x.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(x[:, used], y, rcond=None)
        bounded = [0.0 if feature == MANY_FEATURE else value for feature, value in zip(used, found, strict=True)]
        if not used or min(bounded) >= 0:
            break
        used.pop(int(np.argmin(bounded)))
    solution = np.zeros(x.shape[1])
    solution[used] = found
    return solution
