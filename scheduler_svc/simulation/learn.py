"""A device's profile from the steps of a recording. Pure.

The coefficients are those of relative least squares over all steps, none below zero where that makes no sense of a time: a
model that only follows the last steps, as the scheduler's own does, would not know the others.
"""

import statistics
from collections.abc import Sequence

import numpy as np

from scheduler_svc.core.step_time import StepTimeModel, features
from scheduler_svc.simulation.profile import DeviceProfile
from scheduler_svc.simulation.recorded import MeasuredStep, RecordedRun

_NUM_RATIOS = 200
_WARM_UP_STEPS = 3
_ROUNDS = 4


def learn_profile(run: RecordedRun, name: str) -> DeviceProfile:
    """What executes like the executor of a recording."""
    steps = [step for step in run.steps[_WARM_UP_STEPS:] if step.seconds > 0] or run.steps
    coefficients = fit(steps)
    model = StepTimeModel.of(coefficients)
    overheads = [step.ended_s - step.sent_s - step.seconds for step in steps if step.was_alone]
    start = run.start
    return DeviceProfile(
        name=name,
        coefficients=coefficients,
        decode_ratios=_ratios(model, [step for step in steps if not step.work.num_prefill_tokens]),
        prefill_ratios=_ratios(model, [step for step in steps if step.work.num_prefill_tokens]),
        round_trip_s=max(0.0, statistics.median(overheads)) if overheads else 0.001,
        num_blocks=start.num_blocks,
        block_size=start.block_size,
        max_num_seqs=start.max_num_seqs,
        max_num_batched_tokens=start.max_num_batched_tokens,
    )


def _ratios(model: StepTimeModel, steps: Sequence[MeasuredStep]) -> tuple[float, ...]:
    """Measured to predicted times, as many as are kept, evenly over their distribution."""
    ratios = sorted(step.seconds / max(1e-9, model.predict_s(step.work)) for step in steps)
    if len(ratios) <= _NUM_RATIOS:
        return tuple(ratios) or (1.0,)
    return tuple(ratios[int((i + 0.5) * len(ratios) / _NUM_RATIOS)] for i in range(_NUM_RATIOS))


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
    """Least squares without negative coefficients: those that come out so are left out, the worst first."""
    used = list(range(x.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(x[:, used], y, rcond=None)
        if not used or found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    solution = np.zeros(x.shape[1])
    solution[used] = found
    return solution
