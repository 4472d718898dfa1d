"""Paged attention on the CPU against the float64 reference."""

from typing import Any

import pytest
import torch

from executor_svc.kernels.cpu import CpuBackend
from executor_svc.kernels.reference import reference_paged_attention
from executor_svc.kernels.torch_backend import TorchBackend
from tests.unit.executor_svc.kernels.batches import Shape, Step, make_rotary, make_step

SHAPES = [
    Shape(9, 3, 64, 64, 16),
    Shape(4, 4, 16, 16, 4),
    Shape(8, 1, 80, 80, 16),
    Shape(8, 2, 128, 128, 32),
    Shape(4, 2, 16, 12, 16),
    Shape(60, 1, 64, 48, 4),
]
MIXES = {
    "decodes": ([5, 20, 40, 33], [1, 1, 1, 1]),
    "mixed": ([1, 3, 100, 65, 300], [1, 1, 1, 65, 7]),
    "long_decodes": ([1500, 1030], [1, 1]),
    "chunk": ([290], [257]),
    "first_chunk": ([65], [65]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window_sinks": {"window": 13, "with_sinks": True},
    "softcap": {"softcap": 5.0},
    "rotary": {"rotary_dim": 16},
}
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


def arguments(
    step: Step, window: int | None = None, with_sinks: bool = False, softcap: float | None = None, rotary_dim: int = 0
) -> dict[str, Any]:
    num_tokens, num_heads, head_dim = step.query.shape
    return {
        "scale": head_dim**-0.5,
        "window": window,
        "softcap": softcap,
        "sinks": torch.randn(num_heads) if with_sinks else None,
        "rotary": make_rotary(num_tokens, rotary_dim, step.query.dtype) if rotary_dim else None,
    }


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape: Shape, options: str, mix: str, threads: int) -> None:
    step = make_step(shape, *MIXES[mix])
    given = arguments(step, **OPTIONS[options])
    reference_cache = step.cache_copy()
    expected = reference_paged_attention(step.query, step.key, step.value, reference_cache, step.batch, **given)

    found = CpuBackend().paged_attention(step.query, step.key, step.value, step.cache, step.batch, **given)

    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[shape.dtype])
    torch.testing.assert_close(step.cache.key, reference_cache.key, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(step.cache.value.nan_to_num(7), reference_cache.value.nan_to_num(7))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", [Shape(9, 3, 64, 64, 16, torch.bfloat16), Shape(4, 4, 16, 12, 4, torch.bfloat16)], ids=str)
def test_bfloat16_equals_the_reference(shape: Shape, mix: str) -> None:
    step = make_step(shape, *MIXES[mix])
    given = arguments(step, window=40, with_sinks=True)
    expected = reference_paged_attention(step.query, step.key, step.value, step.cache_copy(), step.batch, **given)

    found = CpuBackend().paged_attention(step.query, step.key, step.value, step.cache, step.batch, **given)

    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[shape.dtype])


def test_strided_heads_of_one_projection_are_read_in_place() -> None:
    step = make_step(Shape(6, 2, 32, 32, 16), *MIXES["mixed"])
    merged = torch.cat([step.query, step.key, step.value], dim=1)
    given = arguments(step)
    expected = reference_paged_attention(step.query, step.key, step.value, step.cache_copy(), step.batch, **given)

    found = CpuBackend().paged_attention(merged[:, :6], merged[:, 6:8], merged[:, 8:], step.cache, step.batch, **given)

    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)


def test_head_major_input_is_read_in_place() -> None:
    step = make_step(Shape(6, 2, 32, 32, 16), *MIXES["mixed"])
    query, key, value = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (step.query, step.key, step.value))
    given = arguments(step)
    expected = reference_paged_attention(step.query, step.key, step.value, step.cache_copy(), step.batch, **given)

    found = CpuBackend().paged_attention(query, key, value, step.cache, step.batch, **given)

    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)


def test_result_does_not_depend_on_what_else_is_in_the_batch() -> None:
    shape = Shape(9, 3, 64, 64, 16)
    backend = CpuBackend()
    step = make_step(shape, [700, 20, 90], [1, 1, 40])
    together = backend.paged_attention(step.query, step.key, step.value, step.cache, step.batch, **arguments(step))
    alone = make_step(shape, [90], [40])
    blocks = step.batch.block_tables[2, :6].long()
    alone.cache.key[alone.batch.block_tables[0, :6].long()] = step.cache.key[blocks]
    alone.cache.value[alone.batch.block_tables[0, :6].long()] = step.cache.value[blocks]

    found = backend.paged_attention(step.query[2:], step.key[2:], step.value[2:], alone.cache, alone.batch, **arguments(step))

    assert torch.equal(found, together[2:])


@pytest.mark.parametrize("mix", MIXES)
def test_plain_torch_backend_equals_the_reference(mix: str) -> None:
    step = make_step(Shape(9, 3, 32, 16, 16), *MIXES[mix])
    given = arguments(step, window=13, with_sinks=True, softcap=5.0, rotary_dim=32)
    expected = reference_paged_attention(step.query, step.key, step.value, step.cache_copy(), step.batch, **given)

    found = TorchBackend().paged_attention(step.query, step.key, step.value, step.cache, step.batch, **given)

    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)


def test_backends_that_read_each_others_blocks_say_so() -> None:
    assert CpuBackend().kv_layout_version == TorchBackend().kv_layout_version
