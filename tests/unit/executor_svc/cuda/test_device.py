"""Steps that a start runs to warm up and to measure: all of them are within the limits."""

from collections.abc import Iterator

import pytest
import torch

from common.errors import StartupError
from executor_svc.core.batch import BatchState
from executor_svc.core.plan import BatchLimits, StepPlan
from executor_svc.core.sampling import SamplingParams
from executor_svc.cuda.device import _full_batch, _full_prefill, _largest_prefill, check_kv_form, chunk_steps, slots_bytes
from executor_svc.kvcache.stored_form import stored_layout
from executor_svc.settings import ExecutorSettings
from tests.unit.executor_svc.kvcache.test_pool import LAYERS


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


@pytest.mark.parametrize(
    ("changes", "capability", "sentence"),
    [
        ({"kv_dtype": "fp8_e4m3"}, (8, 6), "8.9 or more, this one has 8.6"),
        ({"kv_dtype": "fp8_e4m3", "backend": "torch"}, (9, 0), "use --backend triton"),
        ({"kv_stored_form": "int8", "backend": "torch"}, (9, 0), "use --backend triton"),
        ({"kv_stored_form": "int8", "kv_dtype": "fp8_e4m3"}, (9, 0), "use --kv-stored-form native"),
    ],
)
def test_forms_of_keys_and_values_that_a_gpu_cannot_have_are_refused(
    changes: dict[str, object], capability: tuple[int, int], sentence: str
) -> None:
    with pytest.raises(StartupError, match=sentence):
        check_kv_form(ExecutorSettings.model_validate(changes), capability)


@pytest.mark.parametrize("changes", [{}, {"kv_dtype": "fp8_e4m3"}, {"kv_stored_form": "int8"}, {"backend": "torch"}])
def test_forms_that_it_can_have_are_not(changes: dict[str, object]) -> None:
    check_kv_form(ExecutorSettings.model_validate(changes), (8, 9))


def test_the_memory_of_stored_forms_is_planned_before_the_pool() -> None:
    native, small = ExecutorSettings(), ExecutorSettings(kv_stored_form="int8", block_size=16)
    stored_bytes = stored_layout(LAYERS, 16, torch.bfloat16).stored_bytes

    assert slots_bytes(native, LAYERS, torch.bfloat16) == 0
    assert (128 << 20) - stored_bytes < slots_bytes(small, LAYERS, torch.bfloat16) <= 128 << 20
    assert slots_bytes(small, LAYERS, torch.bfloat16) % stored_bytes == 0
