"""Stored blocks: they lie as said, are small, and hold what the block held within a byte's precision."""

import pytest
import torch

from executor_svc.kvcache.pool import block_bytes
from executor_svc.kvcache.stored_form import FORMS, StoredForm, compress, restore, stored_layout
from tests.unit.executor_svc.kvcache.test_pool import LAYERS, Shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_no_two_heads_share_a_byte(dtype: torch.dtype, block_size: int) -> None:
    layout = stored_layout(LAYERS, block_size, dtype)
    taken = torch.zeros(layout.stored_bytes, dtype=torch.int32)
    native = torch.zeros(layout.native_bytes, dtype=torch.int32)
    for head in layout.heads:
        taken[head.rows_start : head.rows_start + head.num_values] += 1
        taken[head.scale_start : head.scale_start + 4] += 1
        native[head.native_start : head.native_start + head.num_values * dtype.itemsize] += 1

    assert taken.max() == native.max() == 1
    assert layout.native_bytes == block_bytes(LAYERS, block_size, dtype)
    assert layout.stored_bytes % 4096 == 0


def test_a_stored_block_of_bfloat16_is_half_as_large() -> None:
    layout = stored_layout([Shape(8, 128, 128)] * 32, 16, torch.bfloat16)

    assert layout.native_bytes / layout.stored_bytes > 1.95


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_what_comes_back_is_within_a_bytes_precision_of_its_head(form: StoredForm) -> None:
    layout = stored_layout(LAYERS, 16, torch.float32)
    blocks = (torch.randn(3, layout.native_bytes // 4) * 1e3).view(torch.uint8)
    found = restore(compress(blocks, form, layout), form, layout).view(torch.float32)
    for head in layout.heads:
        part = slice(head.native_start // 4, head.native_start // 4 + head.num_values)
        values = blocks.view(torch.float32)[:, part]
        largest = values.abs().amax(1, keepdim=True)
        # int8 has 254 even steps; e4m3 three bits behind the first, down to its smallest steps.
        bound = largest / 253 if form.dtype == torch.int8 else torch.maximum(values.abs() / 15.9, largest * 2**-17)
        assert ((found[:, part] - values).abs() <= bound).all()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_head_of_zeros_stays_zero(form: StoredForm) -> None:
    layout = stored_layout(LAYERS, 16, torch.bfloat16)

    assert not restore(compress(torch.zeros(1, layout.native_bytes, dtype=torch.uint8), form, layout), form, layout).any()
