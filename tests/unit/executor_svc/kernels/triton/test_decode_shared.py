"""Decodes that share a prefix, in Triton's interpreter against the float64 reference, which knows nothing of sharing."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from executor_svc.kernels.triton.backend import TritonBackend
from executor_svc.kernels.triton.decode import DecodeWorkspace, paged_decode
from executor_svc.kernels.triton.decode_shared import SharedWorkspace, attend_shared
from tests.unit.executor_svc.kernels.batches import Shape, Step
from tests.unit.executor_svc.kernels.triton.sharing import share
from tests.unit.executor_svc.kernels.triton.steps import expected, make_rows_step

# Groups share multiples of the tile; heads of 128 dimensions in float32 take half the rows and half the tile.
CONFIG = {"rows": 32, "tile": 32, "num_warps": 4, "stages": 2, "programs_per_sm": 1, "overlap": 0}
SHAPES = {
    "one_head_each": Shape(2, 2, 16, 16, 16),
    "two_heads_each": Shape(4, 2, 32, 32, 16),
    "three_heads_each": Shape(6, 2, 64, 64, 16),
    "four_heads_each": Shape(4, 1, 128, 128, 16),
    "eight_heads_each": Shape(8, 1, 16, 16, 16),
    "more_heads_than_rows": Shape(32, 1, 16, 16, 16),
    "large_heads": Shape(2, 1, 256, 256, 16),
    "odd_heads": Shape(4, 2, 24, 40, 16),
    "blocks_of_five": Shape(4, 2, 16, 16, 5),
}
Groups = Sequence[tuple[Sequence[int], int]]


def decode(
    step: Step,
    *,
    num_ranges: int = 3,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    workspaces: tuple[DecodeWorkspace, SharedWorkspace] | None = None,
) -> Tensor:
    (num_seqs, num_heads, _), num_kv_heads, head_dim_v = step.query.shape, step.key.shape[1], step.value.shape[2]
    out = torch.full((num_seqs, num_heads, head_dim_v), float("nan"))
    if workspaces is None:
        own = DecodeWorkspace(num_seqs, num_heads, head_dim_v, 4, "cpu")
        both = SharedWorkspace(num_seqs, num_heads, num_kv_heads, head_dim_v, num_ranges * num_kv_heads, "cpu", max_rows=32)
        both.part_out.fill_(float("nan"))
        both.part_sums.fill_(float("nan"))
        workspaces = own, both
    assert step.batch.shared is not None
    parts = attend_shared(
        step.query,
        step.cache,
        step.batch.block_tables,
        step.batch.shared,
        scale=0.3,
        softcap=softcap,
        workspace=workspaces[1],
        config=CONFIG,
    )
    paged_decode(
        step.query,
        step.cache,
        step.batch.block_tables,
        step.batch.seq_lens,
        out,
        scale=0.3,
        window=None,
        softcap=softcap,
        sinks=sinks,
        workspace=workspaces[0],
        shared=parts,
    )
    assert not workspaces[0].arrived.any()
    return out


def written(shape: Shape, seq_lens: list[int], groups: Groups) -> Step:
    """A step of decodes in groups, with its keys and values in the cache already."""
    step = share(make_rows_step(shape, seq_lens, [1] * len(seq_lens)), groups)
    return dataclasses.replace(step, cache=expected(step, scale=0.3)[1])


def check(step: Step, **asked: object) -> None:
    reference = {name: value for name, value in asked.items() if name in ("softcap", "sinks")}
    wanted = expected(step, scale=0.3, **reference)[0]  # type: ignore[arg-type]
    torch.testing.assert_close(decode(step, **asked).double(), wanted, atol=2e-5, rtol=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_reference(shape: Shape) -> None:
    check(written(shape, [140, 17, 150, 134, 300], [([2, 0, 3], 128)]))


@pytest.mark.parametrize("num_ranges", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 70])
def test_groups_of_any_size(count: int, num_ranges: int) -> None:
    lens = [97 + number % 40 for number in range(count)]
    check(written(Shape(2, 1, 16, 16, 16), [*lens, 33], [(range(count), 96)]), num_ranges=num_ranges)


@pytest.mark.parametrize("num_ranges", [1, 3, 4, 16])
def test_several_groups_and_sequences_in_none(num_ranges: int) -> None:
    lens = [200, 40, 70, 300, 130, 1, 310, 90, 75, 305, 140]
    groups = [([3, 6, 9], 288), ([0, 4, 10], 128), ([8, 2], 64)]
    check(written(Shape(4, 2, 16, 16, 16), lens, groups), num_ranges=num_ranges)


def test_no_group_at_all() -> None:
    check(written(Shape(4, 2, 16, 16, 16), [70, 1, 129], []))


def test_every_sequence_may_have_no_key_of_its_own() -> None:
    """What is shared may reach to the end, though the executor never lets it."""
    step = written(Shape(4, 2, 16, 16, 16), [200, 180, 170], [([0, 1, 2], 128)])
    batch = step.batch
    step = dataclasses.replace(step, batch=dataclasses.replace(batch, seq_lens=torch.tensor([128, 130, 128], dtype=torch.int32)))
    wanted = torch.stack([expected_decode(step, seq, int(length)) for seq, length in enumerate(step.batch.seq_lens)])
    torch.testing.assert_close(decode(step).double(), wanted, atol=2e-5, rtol=1e-4)


def test_padding_rows_behind_sequences_that_share_become_zero() -> None:
    step = written(Shape(4, 2, 16, 16, 16), [200, 180, 170, 40, 90], [([0, 1, 2], 128)])
    batch = step.batch
    wanted = torch.stack([expected_decode(step, seq, int(length)) for seq, length in enumerate(batch.seq_lens)])
    step = dataclasses.replace(
        step, batch=dataclasses.replace(batch, seq_lens=torch.tensor([200, 180, 170, 0, 0], dtype=torch.int32))
    )
    out = decode(step)
    torch.testing.assert_close(out[:3].double(), wanted[:3], atol=2e-5, rtol=1e-4)
    assert not out[3:].any()


def expected_decode(step: Step, seq: int, length: int) -> Tensor:
    """Attention of one query to the first keys of the cache, float64."""
    positions = torch.arange(length)
    blocks, offsets = step.batch.block_tables[seq, positions // 16].long(), positions % 16
    group = step.query.shape[1] // step.key.shape[1]
    key = step.cache.key[blocks, :, offsets].double().repeat_interleave(group, 1)
    value = step.cache.value[blocks, :, offsets].double().repeat_interleave(group, 1)
    weights = (torch.einsum("hd,khd->hk", step.query[seq].double(), key) * 0.3).softmax(1)
    return torch.einsum("hk,khd->hd", weights, value)


@pytest.mark.parametrize("num_ranges", [1, 4])
def test_softcap_and_sinks(num_ranges: int) -> None:
    step = written(Shape(4, 2, 16, 16, 16), [200, 100, 180], [([0, 2], 160)])
    check(step, num_ranges=num_ranges, softcap=1.5, sinks=torch.randn(4))


def test_padding_rows_become_zero_and_read_nothing() -> None:
    step = written(Shape(4, 2, 16, 16, 16), [170, 20, 133, 150], [([0, 2, 3], 128)])
    wanted = expected(step, scale=0.3)[0]
    step.batch.seq_lens[1] = 0
    step.batch.block_tables[1] = 2**30
    out = decode(step)
    assert not out[1].any()
    torch.testing.assert_close(out[[0, 2, 3]].double(), wanted[[0, 2, 3]], atol=2e-5, rtol=1e-4)


def test_workspaces_are_used_again_with_other_groups() -> None:
    workspaces = DecodeWorkspace(4, 4, 16, 4, "cpu"), SharedWorkspace(4, 4, 2, 16, 8, "cpu", max_rows=32)
    for groups in ([([0, 1, 2, 3], 128)], [([1, 3], 160)], [], [([3, 2], 128), ([0, 1], 64)]):
        step = written(Shape(4, 2, 16, 16, 16), [200, 170, 140, 163], groups)
        check(step, workspaces=workspaces)


def test_a_workspace_for_other_heads_or_sequences_is_refused() -> None:
    step = written(Shape(4, 2, 16, 16, 16), [200, 170], [([0, 1], 128)])
    own = DecodeWorkspace(2, 4, 16, 4, "cpu")
    for shared in (SharedWorkspace(2, 8, 2, 16, 8, "cpu"), SharedWorkspace(1, 4, 2, 16, 8, "cpu")):
        with pytest.raises(ValueError, match="workspace"):
            decode(step, workspaces=(own, shared))


@pytest.mark.parametrize("window", [None, 150])
def test_the_backend_shares_in_mixed_batches_and_not_behind_a_window(window: int | None) -> None:
    shape = Shape(4, 2, 16, 16, 16)
    step = share(make_rows_step(shape, [170, 200, 300, 90, 150], [1, 1, 1, 40, 33]), [([0, 1], 128)])
    wanted, _ = expected(step, scale=0.3, window=window)
    out = TritonBackend().paged_attention(
        step.query, step.key, step.value, step.cache, step.batch, scale=0.3, window=window, softcap=None, sinks=None
    )
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("num_ranges", [1, 4])
def test_tokens_of_one_chunk_see_each_other_and_share_what_is_before_them(num_ranges: int) -> None:
    """As the executor divides what is left of a long prompt: all keys are written, then each token attends as a decode."""
    chunk = make_rows_step(Shape(4, 2, 16, 16, 16), [155], [9])
    wanted, cache = expected(chunk, scale=0.3)
    batch = dataclasses.replace(
        chunk.batch,
        block_tables=chunk.batch.block_tables.repeat(9, 1),
        cu_seqlens_q=torch.arange(10, dtype=torch.int32),
        seq_lens=torch.arange(147, 156, dtype=torch.int32),
        num_decodes=9,
    )
    step = share(dataclasses.replace(chunk, cache=cache, batch=batch), [(range(9), 128)])
    torch.testing.assert_close(decode(step, num_ranges=num_ranges).double(), wanted, atol=2e-5, rtol=1e-4)
