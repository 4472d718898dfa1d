"""Attention over a cache of e4m3 in Triton's interpreter, against the float64 reference over the same rounded rows."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from executor_svc.kernels.batch import Rotary
from executor_svc.kernels.e4m3 import decode, encode, exponents_of
from executor_svc.kernels.reference import rotate
from executor_svc.kernels.triton.backend import TritonBackend
from executor_svc.kernels.triton.kv_write import rope_write_kv, write_kv
from executor_svc.kernels.triton.parts import gather
from tests.unit.executor_svc.kernels.batches import Shape
from tests.unit.executor_svc.kernels.triton.e4m3_steps import E4m3Step, make_e4m3_step, plain_cache, rounded
from tests.unit.executor_svc.kernels.triton.sharing import share

SHAPES = {
    "llama": Shape(8, 2, 64, 64, 16),
    "three_heads_each": Shape(9, 3, 32, 32, 16),
    "one_group": Shape(16, 1, 80, 80, 16),
    "values_of_another_size": Shape(4, 2, 24, 40, 16),
    "blocks_of_five": Shape(4, 2, 16, 16, 5),
    "large_blocks": Shape(2, 1, 16, 16, 64),
    "half_precision": Shape(4, 2, 32, 32, 16, torch.float16),
}


def attend(step: E4m3Step, *, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    asked = step.step
    return TritonBackend().paged_attention(
        asked.query, asked.key, asked.value, asked.cache, asked.batch, scale=0.3, window=window, softcap=softcap, sinks=sinks
    )


def check(step: E4m3Step, *, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> None:
    wanted = step.expected(scale=0.3, window=window, softcap=softcap, sinks=sinks)
    exact = step.step.query.dtype == torch.float32
    found = attend(step, window=window, softcap=softcap, sinks=sinks).double()
    torch.testing.assert_close(found, wanted, atol=2e-5 if exact else 4e-3, rtol=1e-4 if exact else 4e-3)
    kept = plain_cache(step.written().step.cache)
    for part, wanted_part in zip(("key", "value"), (kept.key, kept.value), strict=True):
        found_part = getattr(plain_cache(step.step.cache), part)
        torch.testing.assert_close(found_part, wanted_part, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_mixed_batches(shape: Shape) -> None:
    check(make_e4m3_step(shape, [70, 1, 150, 33], [1, 1, 40, 33]))


@pytest.mark.parametrize("window", [1, 70])
def test_windows(window: int) -> None:
    check(make_e4m3_step(Shape(4, 2, 16, 16, 16), [70, 200, 90], [1, 70, 90]), window=window)


def test_softcap_and_sinks() -> None:
    check(make_e4m3_step(Shape(4, 2, 16, 16, 16), [70, 200, 40], [1, 70, 40]), softcap=1.5, sinks=torch.randn(4))


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_decodes_that_share(softcap: float | None) -> None:
    step = make_e4m3_step(Shape(4, 2, 16, 16, 16), [170, 40, 133, 300], [1] * 4)
    shared = share(step.written().step, [([0, 2, 3], 128)])
    plain = replace(step.plain, cache=plain_cache(shared.cache), batch=replace(shared.batch, shared=None))
    check(E4m3Step(shared, plain), softcap=softcap, sinks=torch.randn(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_very_different_sizes(dtype: torch.dtype) -> None:
    """A value may be a thousand times another: weights must not vanish, nor grow out of their format."""
    check(make_e4m3_step(Shape(2, 1, 16, 16, 16, dtype), [300, 70], [1, 1], spread=5.0))


def test_padding_rows_become_zero_and_read_nothing() -> None:
    step = make_e4m3_step(Shape(4, 2, 16, 16, 16), [70, 20, 200], [1] * 3).written()
    wanted = step.expected(scale=0.3)
    batch = step.step.batch
    batch.seq_lens[1], batch.block_tables[1], batch.slot_mapping[1] = 0, 2**30, -1
    found = attend(step)
    assert not found[1].any()
    torch.testing.assert_close(found[[0, 2]].double(), wanted[[0, 2]], atol=2e-5, rtol=1e-4)


def awkward_rows(num_tokens: int, num_heads: int, head_dim: int) -> Tensor:
    """Rows of all sizes: zeros, tiny and huge ones, ties between neighbours of e4m3."""
    rows = torch.randn(num_tokens, num_heads, head_dim) * torch.exp2(torch.randint(-90, 80, (num_tokens, num_heads, 1)).float())
    rows[0, 0] = 0.0
    rows[1, 0] = torch.randint(0, 60, (head_dim,)) * 0.5
    rows[2, 0] = torch.arange(head_dim) / 1024
    rows[3, 0, 0] = 1e30
    return rows


@pytest.mark.parametrize(("head_dim_k", "head_dim_v", "block_size"), [(64, 64, 16), (24, 10, 5)])
def test_writes_are_the_nearest_bytes(head_dim_k: int, head_dim_v: int, block_size: int) -> None:
    num_tokens = 12
    cache = make_e4m3_step(Shape(3, 3, head_dim_k, head_dim_v, block_size), [60], [60]).step.cache
    before = [(part.view(torch.uint8).clone(), exponents_of(part).clone()) for part in (cache.key, cache.value)]
    slots = torch.randperm(60)[:num_tokens]
    slots[5] = -1
    key, value = awkward_rows(num_tokens, 3, head_dim_k), awkward_rows(num_tokens, 3, head_dim_v)
    write_kv(key, value, slots, cache)
    kept = slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    for part, rows, (bytes_before, exponents_before) in zip((cache.key, cache.value), (key, value), before, strict=True):
        wanted, wanted_exponents = encode(rows[kept])
        bytes_before[blocks, :, offsets], exponents_before[blocks, :, offsets] = wanted.view(torch.uint8), wanted_exponents
        assert torch.equal(part.view(torch.uint8), bytes_before)
        assert torch.equal(exponents_of(part), exponents_before)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "rotary_dim"), [(4, 2, 16, 16), (9, 3, 20, 12)])
def test_one_launch_turns_and_writes(num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int) -> None:
    num_tokens = 4
    cache = make_e4m3_step(Shape(num_heads, num_kv_heads, head_dim, head_dim, 16), [90], [90]).step.cache
    slots = torch.randperm(90)[:num_tokens]
    slots[2] = -1
    angles = torch.randn(num_tokens, rotary_dim)
    rotary = Rotary(angles.cos(), angles.sin())
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    out = torch.full((num_tokens, num_heads + 2 * num_kv_heads, head_dim), float("nan"))
    rope_write_kv(qkv, None, slots, cache, out, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rotary=rotary)
    heads = qkv.view(num_tokens, -1, head_dim)
    turned = torch.cat([rotate(heads[:, : num_heads + num_kv_heads].double(), rotary).float(), heads[:, -num_kv_heads:]], 1)
    torch.testing.assert_close(out, turned, atol=1e-5, rtol=1e-5)
    kept = slots >= 0
    blocks, offsets = slots[kept] // 16, slots[kept] % 16
    found = plain_cache(cache)
    for part, rows in ((found.key, out[:, num_heads:-num_kv_heads]), (found.value, out[:, -num_kv_heads:])):
        torch.testing.assert_close(part[blocks, :, offsets], rounded(rows[kept]), atol=0, rtol=0)
        rest = part.clone()
        rest[blocks, :, offsets] = float("nan")
        assert rest.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_context_is_gathered_in_the_dtype_of_queries(dtype: torch.dtype) -> None:
    step = make_e4m3_step(Shape(2, 2, 24, 16, 16), [1, 200], [1, 1])
    keys, values = gather(step.step.cache, step.step.batch.block_tables[1], 35, 130, dtype)
    positions = torch.arange(35, 165)
    blocks, offsets = step.step.batch.block_tables[1, positions // 16].long(), positions % 16
    assert torch.equal(keys, step.plain.cache.key[blocks, :, offsets].to(dtype))
    assert torch.equal(values, step.plain.cache.value[blocks, :, offsets].to(dtype))


def test_a_row_keeps_three_bits_behind_its_first() -> None:
    rows = torch.randn(200, 7, 128) * torch.exp2(torch.randint(-30, 30, (200, 7, 1)).float())
    found = decode(*encode(rows))
    largest = rows.abs().amax(-1, keepdim=True)
    assert ((found - rows).abs() <= torch.maximum(rows.abs() / 16, largest * 2**-17)).all()
