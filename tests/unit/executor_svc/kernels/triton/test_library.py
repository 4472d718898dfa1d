"""What surrounds the library's attention, in Triton's interpreter: gathering a context, joining parts."""

import dataclasses

import pytest
import torch
from torch import Tensor

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.triton.backend import TritonBackend
from executor_svc.kernels.triton.library import Cudnn, library_chunk, pieces
from executor_svc.kernels.triton.parts import gather, join
from executor_svc.kernels.triton.prefill import packed_rows
from tests.unit.executor_svc.kernels.batches import Shape
from tests.unit.executor_svc.kernels.triton.steps import expected, make_rows_step
from tests.unit.executor_svc.model.packed_steps import attend_packed


@pytest.mark.parametrize(("start", "length"), [(0, 100), (16, 84), (35, 1), (64, 130)])
def test_a_context_is_gathered_from_its_blocks(start: int, length: int) -> None:
    step = make_rows_step(Shape(2, 2, 24, 16, 16), [1, 200], [1, 1])
    table = step.batch.block_tables[1]
    keys, values = gather(step.cache, table, start, length, torch.float32)
    positions = torch.arange(start, start + length)
    blocks, offsets = table[positions // 16].long(), positions % 16
    assert torch.equal(keys, step.cache.key[blocks, :, offsets])
    assert torch.equal(values, step.cache.value[blocks, :, offsets])


@pytest.mark.parametrize("rows_first", [False, True])
def test_parts_over_other_keys_are_joined(rows_first: bool) -> None:
    query, keys, values = torch.randn(3, 5, 12), torch.randn(3, 30, 12), torch.randn(3, 30, 12)

    def attend(part: slice) -> tuple[Tensor, Tensor]:
        scores = query @ keys[:, part].transpose(1, 2)
        out, lse = torch.softmax(scores, 2) @ values[:, part], torch.logsumexp(scores, 2, keepdim=True)
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
        if rows_first:
            out, lse = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (out, lse))
        return out, lse

    total, total_lse = attend(slice(0, 4))
    join(total, total_lse, *attend(slice(4, 11)))
    join(total, total_lse, *attend(slice(11, 30)))
    wanted, wanted_lse = attend(slice(0, 30))
    torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(total_lse, wanted_lse)


def test_cudnn_is_not_asked_on_the_cpu() -> None:
    cache = LayerCache(torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 16, 16))
    assert not Cudnn().can(torch.zeros(1, 1, 16), cache, None, None, None)


class PlainLibrary:
    """Attention in plain torch, for chunks of 20 tokens and more; counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def can(
        self, query: Tensor, layer_cache: LayerCache, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> bool:
        return window is None and softcap is None and sinks is None

    def is_worth(self, query_len: int, kv_len: int) -> bool:
        return query_len >= 20

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        self.num_calls += 1
        group = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), float("-inf"))
        out = torch.softmax(scores, 3) @ value.repeat_interleave(group, 1)
        return out, torch.logsumexp(scores, 3, keepdim=True)


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "num_calls"),
    [
        ([50], [50], 1),
        ([90], [50], 2),
        ([30, 60, 70, 40, 5, 90, 35], [1, 1, 30, 25, 5, 7, 35], 5),
        ([30, 60, 70], [1, 25, 30], 4),
        ([30, 8], [1, 8], 0),
    ],
    ids=str,
)
def test_long_chunks_go_to_the_library_wherever_they_stand(seq_lens: list[int], query_lens: list[int], num_calls: int) -> None:
    step = make_rows_step(Shape(4, 2, 16, 16, 16), seq_lens, query_lens)
    wanted, _ = expected(step, scale=0.3)
    library = PlainLibrary()
    out = TritonBackend(library=library).paged_attention(
        step.query,
        step.key,
        step.value,
        step.cache,
        dataclasses.replace(step.batch, query_lens=query_lens, kv_lens=seq_lens),
        scale=0.3,
        window=None,
        softcap=None,
        sinks=None,
    )
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=1e-4)
    assert library.num_calls == num_calls


def test_forms_that_the_library_lacks_do_not_go_there() -> None:
    step = make_rows_step(Shape(4, 2, 16, 16, 16), [50], [50])
    library = PlainLibrary()
    batch = dataclasses.replace(step.batch, query_lens=[50], kv_lens=[50])
    for window in (7, 50):
        TritonBackend(library=library).paged_attention(
            step.query, step.key, step.value, step.cache, batch, scale=0.3, window=window, softcap=None, sinks=None
        )
    assert library.num_calls == 1, "a window as wide as the sequence is none"


class NotingLibrary(PlainLibrary):
    """Notes rows of queries and whether they lie densely, which is the layout for lengths of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[tuple[int, bool]] = []

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        self.queries.append((query.shape[2], query.transpose(1, 2).is_contiguous()))
        return super().attend(query, key, value, scale, causal=causal, with_lse=with_lse)


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "rows"),
    [
        ([1024], [1024], 1024),
        ([1025], [1025], 1536),
        ([9, 1025], [1, 1025], 1537),
        ([2000, 7], [2000, 7], None),
        ([9], [1], None),
    ],
    ids=str,
)
def test_a_long_last_chunk_gets_rows_up_to_the_grid(seq_lens: list[int], query_lens: list[int], rows: int | None) -> None:
    step = make_rows_step(Shape(1, 1, 16, 16, 16), seq_lens, query_lens)
    assert packed_rows(step.batch) is None, "lengths are not known"
    assert packed_rows(dataclasses.replace(step.batch, query_lens=query_lens, kv_lens=seq_lens)) == rows


def test_packed_heads_are_taken_as_they_lie() -> None:
    seq_lens, query_lens = [40, 1100], [1, 1030]
    step = make_rows_step(Shape(2, 1, 16, 16, 16), seq_lens, query_lens)
    wanted, wanted_cache = expected(step, scale=0.3)
    batch = dataclasses.replace(step.batch, query_lens=query_lens, kv_lens=seq_lens)
    library = NotingLibrary()
    out = attend_packed(TritonBackend(library=library), dataclasses.replace(step, batch=batch), 0.3)
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(step.cache.key, wanted_cache.key, equal_nan=True)
    torch.testing.assert_close(step.cache.value, wanted_cache.value, equal_nan=True)
    assert library.queries == [(1536, False), (1536, True)], "the context is not on the grid"


@pytest.mark.parametrize(("num_tokens", "queries"), [(600, [(1024, False)]), (1024, [(1024, False)]), (500, [(500, True)])])
def test_other_heads_are_packed_if_there_is_a_plan(num_tokens: int, queries: list[tuple[int, bool]]) -> None:
    query, key, value = torch.randn(num_tokens, 2, 16), torch.randn(num_tokens, 3, 16)[:, 1:2], torch.randn(num_tokens, 1, 16)
    cache = LayerCache(torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 16, 16))
    library = NotingLibrary()
    out = library_chunk(library, query, key, value, cache, torch.zeros(1, dtype=torch.int32), 0, scale=0.3)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    wanted, _ = PlainLibrary().attend(query, key, value, 0.3, causal=True, with_lse=True)
    torch.testing.assert_close(out, wanted[0].transpose(0, 1))
    assert library.queries == queries


@pytest.mark.parametrize(
    ("num_rows", "context", "lengths"),
    [
        (8192, 8192, [8192]),
        (8192, 24_576 + 100, [24_576, 100]),
        (8192, 32_768 + 16_384 + 5000, [32_768, 16_384, 5000]),
        (7680, 16_384, [8192, 8192]),
        (7680, 24_576, [24_576]),
        (2048, 40_000, [32_768, 7232]),
        (7681, 8192, [8192]),
        (8704, 100_000, [32_768, 32_768, 32_768, 1696]),
        (1024, 0, []),
    ],
)
def test_contexts_are_cut_into_planned_pieces_and_a_rest(num_rows: int, context: int, lengths: list[int]) -> None:
    found = list(pieces(num_rows, context))
    assert [length for _, length in found] == lengths
    assert [start for start, _ in found] == [sum(lengths[:i]) for i in range(len(lengths))]
