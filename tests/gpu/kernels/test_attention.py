"""Paged attention and KV writes on the GPU against float64, in every dtype, with poisoned outputs and caches."""

import dataclasses
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from torch import Tensor

from executor_svc.kernels.batch import AttentionBatch, LayerCache, Rotary
from executor_svc.kernels.reference import rotate
from executor_svc.kernels.triton.backend import TritonBackend
from executor_svc.kernels.triton.decode import DecodeWorkspace, paged_decode
from executor_svc.kernels.triton.kv_write import rope_write_kv
from tests.unit.executor_svc.kernels.batches import Shape, Step
from tests.unit.executor_svc.kernels.triton.steps import expected, make_rows_step

DEVICE = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2e-2, FP16: 4e-3, FP32: 1e-4}
SHAPES = {
    "llama-bf16": Shape(32, 8, 128, 128, 16, BF16),
    "llama-fp16": Shape(8, 2, 128, 128, 16, FP16),
    "llama-fp32": Shape(8, 2, 128, 128, 16, FP32),
    "smollm-bf16": Shape(9, 3, 64, 64, 16, BF16),
    "smollm-fp32": Shape(9, 3, 64, 64, 16, FP32),
    "phi-bf16": Shape(4, 4, 80, 80, 16, BF16),
    "phi3-bf16": Shape(4, 4, 96, 96, 16, BF16),
    "gemma-bf16": Shape(4, 1, 256, 256, 16, BF16),
    "gemma-fp32": Shape(4, 1, 256, 256, 16, FP32),
    "mla-fp16": Shape(4, 4, 192, 128, 16, FP16),
    "one_group-bf16": Shape(16, 1, 64, 64, 16, BF16),
    "blocks_of_five-bf16": Shape(6, 2, 64, 64, 5, BF16),
    "blocks_of_32-bf16": Shape(6, 2, 64, 64, 32, BF16),
}
MIXED = ([1, 700, 33, 1100, 1, 355, 80, 129], [1, 1, 1, 1, 1, 200, 80, 128])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def on_gpu(step: Step) -> Step:
    batch = step.batch
    moved = dataclasses.replace(
        batch,
        slot_mapping=batch.slot_mapping.to(DEVICE),
        block_tables=batch.block_tables.to(DEVICE),
        cu_seqlens_q=batch.cu_seqlens_q.to(DEVICE),
        seq_lens=batch.seq_lens.to(DEVICE),
        query_lens=batch.cu_seqlens_q.diff().tolist(),
        kv_lens=batch.seq_lens.tolist(),
    )
    storage_k, storage_v = step.cache.key, step.cache.value
    num_blocks, key_size = storage_k.shape[0], storage_k[0].numel()
    storage = torch.cat([storage_k.reshape(num_blocks, -1), storage_v.reshape(num_blocks, -1)], dim=1).to(DEVICE)
    cache = LayerCache(storage[:, :key_size].view(storage_k.shape), storage[:, key_size:].view(storage_v.shape))
    return Step(step.query.to(DEVICE), step.key.to(DEVICE), step.value.to(DEVICE), cache, moved)


def attend(backend: TritonBackend, step: Step, **asked: Any) -> Tensor:
    # The allocator hands out what was just freed: an output that is not written shows as NaN.
    poison = step.query.new_full((step.query.shape[0], step.query.shape[1], step.value.shape[2]), float("nan"))
    del poison
    asked = {"scale": 0.1, "window": None, "softcap": None, "sinks": None, **asked}
    return backend.paged_attention(step.query, step.key, step.value, step.cache, step.batch, **asked)


def check(shape: Shape, seq_lens: list[int], query_lens: list[int], **asked: Any) -> None:
    step = make_rows_step(shape, seq_lens, query_lens)
    wanted, wanted_cache = expected(step, scale=0.1, **asked)
    moved = on_gpu(step)
    if "sinks" in asked:
        asked["sinks"] = asked["sinks"].to(DEVICE)
    out = attend(TritonBackend(), moved, **asked)
    torch.testing.assert_close(out.double().cpu(), wanted, atol=TOLERANCE[shape.dtype], rtol=TOLERANCE[shape.dtype])
    torch.testing.assert_close(moved.cache.key.cpu(), wanted_cache.key, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(moved.cache.value.cpu(), wanted_cache.value, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_mixed_batches(shape: Shape) -> None:
    check(shape, *MIXED)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_every_form_of_attention(dtype: torch.dtype) -> None:
    shape = Shape(8, 2, 64, 64, 16, dtype)
    check(shape, *MIXED, window=40)
    check(shape, *MIXED, window=1000, sinks=torch.randn(8))
    check(shape, *MIXED, softcap=3.0)


def test_chunks_alone() -> None:
    shape = Shape(8, 2, 128, 128, 16, BF16)
    check(shape, [1500], [1500])
    check(shape, [900, 40], [600, 40])
    check(shape, [1024, 2048, 512], [1024, 1024, 512])


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_long_chunks_with_and_without_context(dtype: torch.dtype) -> None:
    shape = Shape(4, 2, 128, 128, 16, dtype)
    check(shape, [40, 2500, 300, 3600, 2600], [1, 2500, 30, 1600, 2600])
    check(Shape(2, 1, 64, 64, 16, dtype), [20_000], [1600])


def test_long_sequences_and_many_sequences() -> None:
    check(Shape(4, 1, 128, 128, 16, BF16), [20_000], [1])
    check(Shape(4, 1, 64, 64, 16, BF16), list(range(1, 401)), [1] * 400)


def test_a_captured_decode_follows_lengths_and_tables() -> None:
    shape = Shape(8, 2, 128, 128, 16, BF16)
    backend = TritonBackend()
    steps = [make_rows_step(shape, lens, [1] * 6) for lens in ([5, 900, 33, 64, 1, 300], [700, 3, 1200, 17, 256, 31])]
    wanted = [expected(step, scale=0.1)[0] for step in steps]
    num_blocks = max(step.cache.key.shape[0] for step in steps)
    width = max(step.batch.block_tables.shape[1] for step in steps)

    def into(step: Step) -> Step:
        """The step on the GPU with a pool and tables of a fixed size."""
        moved = on_gpu(step)
        key, value = (
            torch.full((num_blocks, *part.shape[1:]), float("nan")).to(part) for part in (moved.cache.key, moved.cache.value)
        )
        key[: moved.cache.key.shape[0]], value[: moved.cache.value.shape[0]] = moved.cache.key, moved.cache.value
        tables = torch.full((6, width), 2**30, dtype=torch.int32, device=DEVICE)
        tables[:, : moved.batch.block_tables.shape[1]] = moved.batch.block_tables
        batch = AttentionBatch(moved.batch.slot_mapping, tables, moved.batch.cu_seqlens_q, moved.batch.seq_lens, 6, 1, 0, 16)
        return Step(moved.query, moved.key, moved.value, LayerCache(key, value), batch)

    static, other = into(steps[0]), into(steps[1])
    attend(backend, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(backend, static)
    graph.replay()
    torch.testing.assert_close(out.double().cpu(), wanted[0], atol=2e-2, rtol=2e-2)
    for mine, theirs in (
        (static.query, other.query), (static.key, other.key), (static.value, other.value),
        (static.cache.key, other.cache.key), (static.cache.value, other.cache.value),
        (static.batch.slot_mapping, other.batch.slot_mapping), (static.batch.block_tables, other.batch.block_tables),
        (static.batch.seq_lens, other.batch.seq_lens),
    ):  # fmt: skip
        mine.copy_(theirs)
    graph.replay()
    torch.testing.assert_close(out.double().cpu(), wanted[1], atol=2e-2, rtol=2e-2)
    static.batch.seq_lens[2:].zero_()
    static.batch.slot_mapping[2:] = -1
    graph.replay()
    torch.testing.assert_close(out[:2].double().cpu(), wanted[1][:2], atol=2e-2, rtol=2e-2)
    assert not out[2:].any()


def test_results_repeat_bit_for_bit() -> None:
    step = on_gpu(make_rows_step(Shape(32, 8, 128, 128, 16, BF16), [3000, 1, 700, 64, 4000, 90], [1] * 6))
    backend = TritonBackend()
    first = attend(backend, step)
    assert all(torch.equal(first, attend(backend, step)) for _ in range(200))


@pytest.mark.parametrize("programs_per_sm", [1, 2, 4, 8])
@pytest.mark.parametrize(("tile", "num_warps"), [(16, 1), (32, 2), (64, 4), (128, 4), (128, 8)])
def test_every_configuration_is_right(tile: int, num_warps: int, programs_per_sm: int) -> None:
    step = make_rows_step(Shape(8, 2, 128, 128, 16, BF16), [3000, 1, 700, 65, 90], [1] * 5)
    wanted, cache = expected(step, scale=0.1)
    moved = on_gpu(Step(step.query, step.key, step.value, cache, step.batch))
    out = torch.full_like(moved.query, float("nan"))
    workspace = DecodeWorkspace(8, 8, 128, 1000, DEVICE)
    paged_decode(
        moved.query, moved.cache, moved.batch.block_tables, moved.batch.seq_lens, out,
        scale=0.1, window=None, softcap=None, sinks=None, workspace=workspace,
        config={"tile": tile, "num_warps": num_warps, "stages": 3, "programs_per_sm": programs_per_sm},
    )  # fmt: skip
    torch.testing.assert_close(out.double().cpu(), wanted, atol=2e-2, rtol=2e-2)
    assert not workspace.arrived.any()


@pytest.mark.parametrize("num_tokens", [3, 700])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_one_launch_norms_turns_and_writes(num_tokens: int, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim = 16, 8, 128
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=DEVICE).to(dtype)
    angles = torch.randn(5000, head_dim // 2, device=DEVICE).repeat(1, 2)
    table = Rotary(angles.cos(), angles.sin())
    positions = torch.randint(5000, (num_tokens,), device=DEVICE)
    slots = torch.randperm(800, device=DEVICE)[:num_tokens]
    storage = torch.full((50, 2, num_kv_heads, 16, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    cache = LayerCache(storage[:, 0], storage[:, 1])
    weights = torch.randn(2, head_dim, device=DEVICE).to(dtype)
    query_out = torch.full((num_tokens, num_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    rope_write_kv(
        qkv, positions, slots, cache, query_out, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        rotary=table, q_norm_weight=weights[0], k_norm_weight=weights[1], norm_eps=1e-5,
    )  # fmt: skip
    query, key, value = (
        qkv.double().view(num_tokens, -1, head_dim).split_with_sizes([num_heads, num_kv_heads, num_kv_heads], dim=1)
    )
    rows = Rotary(table.cos[positions].double(), table.sin[positions].double())
    query, key = (
        rotate(x * torch.rsqrt(x.square().mean(2, keepdim=True) + 1e-5) * w.double(), rows)
        for x, w in ((query, weights[0]), (key, weights[1]))
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(query_out.double(), query, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(cache.key[slots // 16, :, slots % 16].double(), key, atol=tolerance, rtol=tolerance)
    assert torch.equal(cache.value[slots // 16, :, slots % 16].double(), value)
    assert int(storage.isnan().all(-1).sum()) == 2 * num_kv_heads * (800 - num_tokens)
