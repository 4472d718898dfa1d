"""Stored blocks by Triton's interpreter are those of plain torch, byte for byte."""

import pytest
import torch

from executor_svc.kernels.triton.stored_form import StoredFormKernels
from executor_svc.kvcache.stored_form import FORMS, StoredForm, StoredLayout, compress, restore, stored_layout
from tests.unit.executor_svc.kvcache.test_pool import Shape

LAYERS = [Shape(3, 64, 64), Shape(1, 16, 12)]


def make_blocks(layout: StoredLayout, count: int) -> torch.Tensor:
    """Heads of different sizes, one of them zero."""
    blocks = torch.zeros(count, layout.native_bytes, dtype=torch.uint8)
    for number, head in enumerate(layout.heads):
        part = blocks[:, head.native_start :][:, : head.num_values * layout.dtype.itemsize].view(layout.dtype)
        part.copy_(torch.randn(part.shape) * 10.0 ** (number - 4) * (number != 1))
    return blocks


def same_heads(found: torch.Tensor, wanted: torch.Tensor, layout: StoredLayout, *, stored: bool) -> bool:
    """Whether all bytes of heads are equal; those between parts may be anything."""
    parts = [(head.rows_start, head.num_values) for head in layout.heads] + [(head.scale_start, 4) for head in layout.heads]
    if not stored:
        parts = [(head.native_start, head.num_values * layout.dtype.itemsize) for head in layout.heads]
    return all(torch.equal(found[:, start : start + size], wanted[:, start : start + size]) for start, size in parts)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize(
    ("dtype", "block_size"), [(torch.float32, 5), (torch.float16, 16), (torch.bfloat16, 16), (torch.float32, 128)], ids=str
)
def test_bytes_are_those_of_plain_torch(form: StoredForm, dtype: torch.dtype, block_size: int) -> None:
    layers = LAYERS[:1] if block_size == 128 else LAYERS
    layout = stored_layout(layers, block_size, dtype)
    blocks, ids = make_blocks(layout, 4), torch.tensor([2, 0])
    kernels = StoredFormKernels(form, layout, "cpu")
    stored = torch.full((3, layout.stored_bytes), 0x7F, dtype=torch.uint8)
    kernels.compress(blocks, ids, stored)

    assert same_heads(stored[:2], compress(blocks[ids], form, layout), layout, stored=True)
    assert (stored[2] == 0x7F).all()

    into = torch.full_like(blocks, 0x7F)
    kernels.restore(stored, ids, into)
    if dtype != torch.bfloat16:  # which is cut off instead of rounded where kernels are interpreted
        assert same_heads(into[ids], restore(stored[:2], form, layout), layout, stored=False)
    assert (into[[1, 3]] == 0x7F).all()
