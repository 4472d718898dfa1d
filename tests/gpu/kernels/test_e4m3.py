"""Paged attention over a cache of e4m3 on the GPU, against float64 over the same rounded rows; outputs and caches poisoned."""

from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU that converts e4m3", allow_module_level=True)

from torch import Tensor

from executor_svc.kernels.batch import LayerCache, Rotary
from executor_svc.kernels.e4m3 import encode, exponents_of
from executor_svc.kernels.reference import rotate
from executor_svc.kernels.triton.backend import TritonBackend
from executor_svc.kernels.triton.decode import DecodeWorkspace, paged_decode
from executor_svc.kernels.triton.kv_write import rope_write_kv, write_kv
from executor_svc.kernels.triton.parts import gather
from tests.unit.executor_svc.kernels.batches import Shape, Step
from tests.unit.executor_svc.kernels.triton.e4m3_steps import E4m3Step, e4m3_cache, make_e4m3_step, plain_cache, rounded
from tests.unit.executor_svc.kernels.triton.sharing import share
from tests.unit.executor_svc.kernels.triton.test_e4m3 import awkward_rows

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 1e-2, FP16: 4e-3, FP32: 1e-4}
SHAPES = {
    "llama-bf16": Shape(32, 8, 128, 128, 16, BF16),
    "llama-fp16": Shape(8, 2, 128, 128, 16, FP16),
    "llama-fp32": Shape(8, 2, 128, 128, 16, FP32),
    "smollm-bf16": Shape(9, 3, 64, 64, 16, BF16),
    "phi-bf16": Shape(4, 4, 80, 80, 16, BF16),
    "gemma-bf16": Shape(4, 1, 256, 256, 16, BF16),
    "mla-fp16": Shape(4, 4, 192, 128, 16, FP16),
    "one_group-bf16": Shape(16, 1, 64, 64, 16, BF16),
    "blocks_of_five-bf16": Shape(6, 2, 64, 64, 5, BF16),
    "blocks_of_32-bf16": Shape(6, 2, 64, 64, 32, BF16),
}
MIXED = ([1, 700, 33, 1100, 1, 355, 80, 129], [1, 1, 1, 1, 1, 200, 80, 128])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def on_gpu(step: Step, cache: LayerCache) -> Step:
    batch = step.batch
    shared = batch.shared
    if shared is not None:
        shared = replace(shared, **{name: getattr(shared, name).to(DEVICE) for name in shared.__dataclass_fields__})
    moved = replace(
        batch,
        slot_mapping=batch.slot_mapping.to(DEVICE),
        block_tables=batch.block_tables.to(DEVICE),
        cu_seqlens_q=batch.cu_seqlens_q.to(DEVICE),
        seq_lens=batch.seq_lens.to(DEVICE),
        query_lens=batch.cu_seqlens_q.diff().tolist(),
        kv_lens=batch.seq_lens.tolist(),
        shared=shared,
    )
    return Step(step.query.to(DEVICE), step.key.to(DEVICE), step.value.to(DEVICE), cache, moved)


def attend(backend: TritonBackend, step: Step, **asked: Any) -> Tensor:
    # The allocator hands out what was just freed: an output that is not written shows as NaN.
    poison = step.query.new_full((step.query.shape[0], step.query.shape[1], step.value.shape[2]), float("nan"))
    del poison
    asked = {"scale": 0.1, "window": None, "softcap": None, "sinks": None, **asked}
    return backend.paged_attention(step.query, step.key, step.value, step.cache, step.batch, **asked)


def check(step: E4m3Step, tolerance: float, **asked: Any) -> None:
    wanted = step.expected(scale=0.1, **asked)
    moved = on_gpu(step.step, e4m3_cache(step.plain.cache, DEVICE))
    if "sinks" in asked:
        asked["sinks"] = asked["sinks"].to(DEVICE)
    out = attend(TritonBackend(), moved, **asked)
    torch.testing.assert_close(out.double().cpu(), wanted, atol=tolerance, rtol=tolerance)
    kept, wanted_cache = plain_cache(moved.cache), step.written().plain.cache
    for found_part, wanted_part in ((kept.key, wanted_cache.key), (kept.value, wanted_cache.value)):
        torch.testing.assert_close(found_part.cpu(), wanted_part, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_mixed_batches(shape: Shape) -> None:
    check(make_e4m3_step(shape, *MIXED), TOLERANCE[shape.dtype])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_every_form_of_attention(dtype: torch.dtype) -> None:
    shape = Shape(8, 2, 64, 64, 16, dtype)
    check(make_e4m3_step(shape, *MIXED), TOLERANCE[dtype], window=40)
    check(make_e4m3_step(shape, *MIXED), TOLERANCE[dtype], window=1000, sinks=torch.randn(8))
    check(make_e4m3_step(shape, *MIXED), TOLERANCE[dtype], softcap=3.0)


def test_rows_of_very_different_sizes() -> None:
    check(make_e4m3_step(Shape(8, 2, 128, 128, 16, BF16), [3000, 70], [1, 1], spread=5.0), 2e-2)


def test_long_chunks_attend_to_their_own_keys_as_they_are() -> None:
    for lens in (([2500, 3600], [2500, 1600]), ([20_000], [1600])):
        step = make_e4m3_step(Shape(4, 2, 128, 128, 16, BF16), *lens)
        fresh = replace(step.plain, key=step.step.key.float(), value=step.step.value.float())
        wanted = E4m3Step(step.step, fresh).expected(scale=0.1)
        moved = on_gpu(step.step, e4m3_cache(step.plain.cache, DEVICE))
        torch.testing.assert_close(attend(TritonBackend(), moved).double().cpu(), wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_decodes_that_share(dtype: torch.dtype) -> None:
    lens = [700, 650, 40, 900, 660, 1200, 1210]
    step = make_e4m3_step(Shape(32, 8, 128, 128, 16, dtype), lens, [1] * 7).written()
    shared = share(step.step, [([0, 1, 4], 640), ([5, 6], 1152)])
    plain = replace(step.plain, cache=plain_cache(shared.cache), batch=replace(shared.batch, shared=None))
    check(E4m3Step(shared, plain), TOLERANCE[dtype])
    check(E4m3Step(shared, plain), TOLERANCE[dtype], softcap=2.0)


def test_long_sequences_and_many_sequences() -> None:
    check(make_e4m3_step(Shape(4, 1, 128, 128, 16, BF16), [20_000], [1]), 1e-2)
    check(make_e4m3_step(Shape(4, 1, 64, 64, 16, BF16), list(range(1, 401)), [1] * 400), 1e-2)


def test_results_repeat_bit_for_bit() -> None:
    step = make_e4m3_step(Shape(32, 8, 128, 128, 16, BF16), [3000, 1, 700, 64, 4000, 90], [1] * 6)
    moved, backend = on_gpu(step.step, e4m3_cache(step.plain.cache, DEVICE)), TritonBackend()
    first = attend(backend, moved)
    assert all(torch.equal(first, attend(backend, moved)) for _ in range(200))


@pytest.mark.parametrize("programs_per_sm", [1, 4])
@pytest.mark.parametrize(("tile", "num_warps"), [(16, 1), (32, 2), (64, 4), (128, 4)])
def test_every_configuration_is_right(tile: int, num_warps: int, programs_per_sm: int) -> None:
    step = make_e4m3_step(Shape(8, 2, 128, 128, 16, BF16), [3000, 1, 700, 65, 90], [1] * 5).written()
    moved = on_gpu(step.step, e4m3_cache(step.plain.cache, DEVICE))
    out = torch.full_like(moved.query, float("nan"))
    workspace = DecodeWorkspace(8, 8, 128, 1000, DEVICE)
    paged_decode(
        moved.query, moved.cache, moved.batch.block_tables, moved.batch.seq_lens, out,
        scale=0.1, window=None, softcap=None, sinks=None, workspace=workspace,
        config={"tile": tile, "num_warps": num_warps, "stages": 3, "programs_per_sm": programs_per_sm},
    )  # fmt: skip
    torch.testing.assert_close(out.double().cpu(), step.expected(scale=0.1), atol=1e-2, rtol=1e-2)
    assert not workspace.arrived.any()


def test_writes_are_the_nearest_bytes() -> None:
    cache = e4m3_cache(LayerCache(*(torch.full((50, 3, 16, 64), float("nan")) for _ in range(2))), DEVICE)
    slots = torch.randperm(800, device=DEVICE)[:300]
    key, value = awkward_rows(300, 3, 64), awkward_rows(300, 3, 64)
    write_kv(key.to(DEVICE), value.to(DEVICE), slots, cache)
    for part, rows in ((cache.key, key), (cache.value, value)):
        wanted, exponents = encode(rows)
        assert torch.equal(part.view(torch.uint8)[slots // 16, :, slots % 16].cpu(), wanted.view(torch.uint8))
        assert torch.equal(exponents_of(part)[slots // 16, :, slots % 16].cpu(), exponents)
        assert int((exponents_of(part) == 255).sum()) == 3 * 500


@pytest.mark.parametrize("num_tokens", [3, 700])
def test_one_launch_turns_and_writes(num_tokens: int) -> None:
    num_heads, num_kv_heads, head_dim = 16, 8, 128
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=DEVICE)
    angles = torch.randn(num_tokens, head_dim // 2, device=DEVICE).repeat(1, 2)
    rotary = Rotary(angles.cos(), angles.sin())
    slots = torch.randperm(800, device=DEVICE)[:num_tokens]
    cache = e4m3_cache(LayerCache(*(torch.full((50, num_kv_heads, 16, head_dim), float("nan")) for _ in range(2))), DEVICE)
    out = torch.full((num_tokens, num_heads + 2 * num_kv_heads, head_dim), float("nan"), device=DEVICE)
    rope_write_kv(qkv, None, slots, cache, out, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rotary=rotary)
    heads = qkv.view(num_tokens, -1, head_dim)
    turned = torch.cat([rotate(heads[:, :-num_kv_heads].double(), rotary).float(), heads[:, -num_kv_heads:]], 1)
    torch.testing.assert_close(out, turned, atol=1e-5, rtol=1e-5)
    found = plain_cache(cache)
    for part, rows in ((found.key, out[:, num_heads:-num_kv_heads]), (found.value, out[:, -num_kv_heads:])):
        assert torch.equal(part[slots // 16, :, slots % 16], rounded(rows))
        assert int(part.isnan().all(-1).sum()) == num_kv_heads * (800 - num_tokens)


def test_a_context_is_gathered_in_the_dtype_of_queries() -> None:
    step = make_e4m3_step(Shape(2, 2, 128, 64, 16), [1, 2000], [1, 1])
    cache, table = e4m3_cache(step.plain.cache, DEVICE), step.step.batch.block_tables[1]
    keys, values = gather(cache, table.to(DEVICE), 35, 1300, BF16)
    positions = torch.arange(35, 1335)
    blocks, offsets = table[positions // 16].long(), positions % 16
    assert torch.equal(keys.cpu(), step.plain.cache.key[blocks, :, offsets].bfloat16())
    assert torch.equal(values.cpu(), step.plain.cache.value[blocks, :, offsets].bfloat16())
