"""What surrounds the library's attention, in Triton's interpreter: gathering a context, joining parts."""

import pytest
import torch

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.triton.library import gather, join, library_can
from tests.unit.executor_svc.kernels.batches import Shape
from tests.unit.executor_svc.kernels.triton.steps import make_rows_step


@pytest.mark.parametrize(("start", "length"), [(0, 100), (16, 84), (35, 1), (64, 130)])
def test_a_context_is_gathered_from_its_blocks(start: int, length: int) -> None:
    step = make_rows_step(Shape(2, 2, 24, 16, 16), [1, 200], [1, 1])
    table = step.batch.block_tables[1]
    keys, values = gather(step.cache, table, start, length)
    positions = torch.arange(start, start + length)
    blocks, offsets = table[positions // 16].long(), positions % 16
    assert torch.equal(keys, step.cache.key[blocks, :, offsets])
    assert torch.equal(values, step.cache.value[blocks, :, offsets])


@pytest.mark.parametrize("rows_first", [False, True])
def test_parts_over_other_keys_are_joined(rows_first: bool) -> None:
    query, keys, values = torch.randn(3, 5, 12), torch.randn(3, 30, 12), torch.randn(3, 30, 12)

    def attend(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
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


def test_the_library_is_not_asked_on_the_cpu() -> None:
    cache = LayerCache(torch.zeros(1, 1, 16, 16), torch.zeros(1, 1, 16, 16))
    assert not library_can(torch.zeros(1, 1, 16), cache, None, None, None)
