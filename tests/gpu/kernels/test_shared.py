"""Decodes that share a prefix on the GPU against float64, in every dtype, with poisoned outputs, caches and workspaces."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from torch import Tensor

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.triton.decode import DecodeWorkspace, paged_decode
from executor_svc.kernels.triton.decode_shared import SharedWorkspace, attend_shared
from tests.unit.executor_svc.kernels.batches import Shape, Step
from tests.unit.executor_svc.kernels.triton.sharing import share
from tests.unit.executor_svc.kernels.triton.steps import expected, make_rows_step

DEVICE = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2e-2, FP16: 4e-3, FP32: 1e-4}
SHAPES = {
    "llama-bf16": Shape(32, 8, 128, 128, 16, BF16),
    "llama-fp16": Shape(8, 2, 128, 128, 16, FP16),
    "llama-fp32": Shape(8, 2, 128, 128, 16, FP32),
    "qwen3-bf16": Shape(16, 8, 128, 128, 16, BF16),
    "smollm-bf16": Shape(9, 3, 64, 64, 16, BF16),
    "phi-bf16": Shape(4, 4, 80, 80, 16, BF16),
    "gemma-bf16": Shape(4, 1, 256, 256, 16, BF16),
    "gemma-fp32": Shape(4, 1, 256, 256, 16, FP32),
    "mla-fp16": Shape(4, 4, 192, 128, 16, FP16),
    "eight_heads-bf16": Shape(8, 1, 64, 64, 16, BF16),
    "blocks_of_five-bf16": Shape(6, 2, 64, 64, 5, BF16),
}
LENS = [700, 33, 1100, 655, 80, 900, 671, 1301, 645, 1, 1029]
GROUPS = [([0, 3, 6, 8], 640), ([2, 10, 7], 1024)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_step(shape: Shape, lens: list[int], groups: Sequence[tuple[Sequence[int], int]]) -> tuple[Step, Step]:
    """A step of decodes in groups, with its keys and values in the cache already, on the CPU and on the GPU."""
    step = share(make_rows_step(shape, lens, [1] * len(lens)), groups)
    step = dataclasses.replace(step, cache=expected(step, scale=0.1)[1])
    batch, shared = step.batch, step.batch.shared
    assert shared is not None
    moved = dataclasses.replace(
        batch,
        slot_mapping=batch.slot_mapping.to(DEVICE),
        block_tables=batch.block_tables.to(DEVICE),
        cu_seqlens_q=batch.cu_seqlens_q.to(DEVICE),
        seq_lens=batch.seq_lens.to(DEVICE),
        shared=dataclasses.replace(shared, **{name: array.to(DEVICE) for name, array in vars(shared).items()}),
    )
    cache = LayerCache(step.cache.key.to(DEVICE), step.cache.value.to(DEVICE))
    return step, Step(step.query.to(DEVICE), step.key.to(DEVICE), step.value.to(DEVICE), cache, moved)


class Attention:
    """Attention of decodes in workspaces of its own, whose parts are poisoned first."""

    def __init__(self, step: Step, max_ranges_sms: int = 132) -> None:
        (num_seqs, num_heads, _), num_kv_heads, head_dim_v = step.query.shape, step.key.shape[1], step.value.shape[2]
        self.own = DecodeWorkspace(num_seqs, num_heads, head_dim_v, 1000, DEVICE)
        self.shared = SharedWorkspace(num_seqs, num_heads, num_kv_heads, head_dim_v, max_ranges_sms, DEVICE)
        self.shared.part_out.fill_(float("nan"))
        self.shared.part_sums.fill_(float("nan"))
        self.out = torch.full((num_seqs, num_heads, head_dim_v), float("nan"), dtype=step.query.dtype, device=DEVICE)

    def __call__(
        self,
        step: Step,
        *,
        config: dict[str, int] | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        batch = step.batch
        assert batch.shared is not None
        parts = attend_shared(
            step.query, step.cache, batch.block_tables, batch.shared, scale=0.1, softcap=softcap, workspace=self.shared,
            config=config,
        )  # fmt: skip
        paged_decode(
            step.query, step.cache, batch.block_tables, batch.seq_lens, self.out, scale=0.1, window=None, softcap=softcap,
            sinks=sinks, workspace=self.own, shared=parts,
        )  # fmt: skip
        return self.out


def check(shape: Shape, lens: list[int], groups: Sequence[tuple[Sequence[int], int]], **asked: Any) -> None:
    step, moved = make_step(shape, lens, groups)
    reference = {name: value for name, value in asked.items() if name != "config"}
    wanted, _ = expected(step, scale=0.1, **reference)
    if "sinks" in asked:
        asked["sinks"] = asked["sinks"].to(DEVICE)
    attention = Attention(moved)
    out = attention(moved, **asked)
    torch.testing.assert_close(out.double().cpu(), wanted, atol=TOLERANCE[shape.dtype], rtol=TOLERANCE[shape.dtype])
    assert not attention.own.arrived.any()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_reference(shape: Shape) -> None:
    check(shape, LENS, GROUPS)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_softcap_and_sinks(dtype: torch.dtype) -> None:
    check(Shape(8, 2, 64, 64, 16, dtype), LENS, GROUPS, softcap=3.0, sinks=torch.randn(8))


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 70])
def test_groups_of_any_size(count: int) -> None:
    check(Shape(8, 2, 128, 128, 16, BF16), [*(515 + i for i in range(count)), 40], [(range(count), 512)])


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("programs_per_sm", [1, 2])
@pytest.mark.parametrize(
    ("rows", "tile", "num_warps", "stages"), [(16, 64, 4, 3), (32, 128, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2)]
)
def test_every_configuration_is_right(
    rows: int, tile: int, num_warps: int, stages: int, programs_per_sm: int, overlap: int
) -> None:
    config = {"rows": rows, "tile": tile, "num_warps": num_warps, "stages": stages}
    config |= {"programs_per_sm": programs_per_sm, "overlap": overlap}
    lens = [*(1030 + 3 * i for i in range(40)), 70, 1, 3000]
    check(Shape(8, 2, 128, 128, 16, BF16), lens, [(range(0, 40, 2), 1024), (range(1, 40, 2), 512)], config=config)


def test_a_captured_step_follows_groups() -> None:
    shape = Shape(8, 2, 128, 128, 16, BF16)
    made = [make_step(shape, LENS, groups) for groups in (GROUPS, [([0, 2, 5, 7], 640)], [])]
    wanted = [expected(step, scale=0.1)[0] for step, _ in made]
    static = made[0][1]
    assert static.batch.shared is not None
    attention = Attention(static)
    attention(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(static)
    for (_, other), right in zip(made, wanted, strict=True):
        assert other.batch.shared is not None
        for mine, theirs in (
            (static.query, other.query), (static.cache.key, other.cache.key), (static.cache.value, other.cache.value),
            (static.batch.block_tables, other.batch.block_tables), (static.batch.seq_lens, other.batch.seq_lens),
            *zip(vars(static.batch.shared).values(), vars(other.batch.shared).values(), strict=True),
        ):  # fmt: skip
            mine.copy_(theirs)
        attention.out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(attention.out.double().cpu(), right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("overlap", [0, 1])
def test_results_repeat_bit_for_bit(overlap: int) -> None:
    _, moved = make_step(Shape(32, 8, 128, 128, 16, BF16), LENS, GROUPS)
    config = {"rows": 64, "tile": 64, "num_warps": 4, "stages": 3, "programs_per_sm": 1, "overlap": overlap}
    attention = Attention(moved)
    first = attention(moved, config=config).clone()
    assert all(torch.equal(first, attention(moved, config=config)) for _ in range(200))
