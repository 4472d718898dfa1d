"""Steps that a start runs to warm up and to measure: all of them are within the limits."""

from collections.abc import Iterator

import pytest

from executor_svc.core.batch import BatchState
from executor_svc.core.plan import BatchLimits, StepPlan
from executor_svc.core.sampling import SamplingParams
from executor_svc.cuda.device import _full_batch, _full_prefill, _largest_prefill, chunk_steps


def sessions(limits: BatchLimits) -> Iterator[list[StepPlan[SamplingParams]]]:
    yield from chunk_steps(limits)
    yield [_full_batch(limits)]
    for with_context in (False, True):
        yield [_full_prefill(limits, _largest_prefill(limits), with_context)]


@pytest.mark.parametrize(
    "limits",
    [
        BatchLimits(2000, 16, 256, 8192, 131072, 1000),
        BatchLimits(1300, 16, 8, 512, 4096, 1000),
        BatchLimits(1300, 16, 256, 8192, 1024, 1000),
        BatchLimits(600, 16, 1, 8192, 8192, 1000),
        BatchLimits(300, 1, 4, 64, 256, 1000),
    ],
)
def test_every_step_is_carried_out_by_every_sequence(limits: BatchLimits) -> None:
    for steps in sessions(limits):
        batch: BatchState[SamplingParams] = BatchState(limits)
        for step in steps:
            chunks, failures = batch.apply(step)
            assert not failures
            assert len(chunks) == len(step.chunks) > 0
            batch.advance_ahead(chunks)
            batch.check_integrity()
