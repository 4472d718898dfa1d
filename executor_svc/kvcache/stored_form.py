"""The smaller form in which blocks of a 16- or 32-bit pool may lie below the device: bytes with one scale per block and head.

Knows how such a block lies and what its values are, in plain torch; kernels/triton/stored_form.py computes the same on a GPU.
Does not know pools, stores or who asks for it.

```
a part of a stored block  | rows: e4m3 or int8 [num_kv_heads, block_size, head_dim] | pad | scales: float32 [num_kv_heads] | pad |
                          parts follow each other as in the pool: K and V of layer 0, K and V of layer 1, ...
```
Rows and scales start at multiples of 64 bytes; a block is a multiple of 4,096 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor_svc.kernels.e4m3 import E4M3
from executor_svc.kvcache.pool import BLOCK_ALIGNMENT, PART_ALIGNMENT, KvShape, part_offsets, round_up

SMALLEST = 1e-30
"""Heads whose largest value is not above this are zero."""


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How a value becomes a byte.

    Attributes:
        name: in settings and in the fingerprint.
        dtype: of a byte.
        largest: what the largest value of a head becomes.
    """

    name: str
    dtype: torch.dtype
    largest: float


FORMS = {form.name: form for form in (StoredForm("fp8_e4m3", E4M3, 448.0), StoredForm("int8", torch.int8, 127.0))}


@dataclass(frozen=True, slots=True)
class StoredHead:
    """One head of a layer's keys or values.

    Attributes:
        num_values: tokens of a block times the head's size.
        native_start: byte of a pool's block at which its values begin.
        rows_start: byte of a stored block at which they begin.
        scale_start: byte of a stored block that has its scale.
    """

    num_values: int
    native_start: int
    rows_start: int
    scale_start: int


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """Where everything lies.

    Attributes:
        heads: of all layers, keys before values, in order.
        dtype: of the pool.
        native_bytes: of a block of the pool.
        stored_bytes: of a stored block.
    """

    heads: tuple[StoredHead, ...]
    dtype: torch.dtype
    native_bytes: int
    stored_bytes: int


def stored_layout(layers: Sequence[KvShape], block_size: int, dtype: torch.dtype) -> StoredLayout:
    """The layout of stored blocks of a pool.

    Args:
        layers: of the pool.
        block_size: tokens per block.
        dtype: of the pool: float32, bfloat16 or float16.
    """
    *natives, native_bytes = part_offsets(layers, block_size, dtype)
    heads: list[StoredHead] = []
    end = 0
    sizes = [(spec.num_kv_heads, block_size * dim) for spec in layers for dim in (spec.head_dim_k, spec.head_dim_v)]
    for (num_heads, num_values), native in zip(sizes, natives, strict=True):
        scales = end + round_up(num_heads * num_values, PART_ALIGNMENT)
        heads += (
            StoredHead(num_values, native + head * num_values * dtype.itemsize, end + head * num_values, scales + 4 * head)
            for head in range(num_heads)
        )
        end = scales + round_up(4 * num_heads, PART_ALIGNMENT)
    return StoredLayout(tuple(heads), dtype, native_bytes, round_up(end, BLOCK_ALIGNMENT))


def compress(blocks: Tensor, form: StoredForm, layout: StoredLayout) -> Tensor:
    """Blocks of a pool, uint8 [num_blocks, native_bytes], as stored ones, uint8 [num_blocks, stored_bytes]."""
    stored = blocks.new_zeros(blocks.shape[0], layout.stored_bytes)
    for head in layout.heads:
        values = _part(blocks, head.native_start, head.num_values, layout.dtype).float()
        largest = values.abs().amax(1, keepdim=True)
        is_something = largest > SMALLEST
        bytes_per_value = torch.where(is_something, torch.full_like(largest, form.largest) / largest, 0.0)
        scaled = (values * bytes_per_value).clamp(-form.largest, form.largest)
        rounded = scaled.round() if form.dtype == torch.int8 else scaled
        _part(stored, head.rows_start, head.num_values, form.dtype).copy_(rounded.to(form.dtype))
        _part(stored, head.scale_start, 1, torch.float32).copy_(torch.where(is_something, largest / form.largest, 0.0))
    return stored


def restore(stored: Tensor, form: StoredForm, layout: StoredLayout) -> Tensor:
    """Stored blocks as blocks of the pool; bytes between parts are zero."""
    blocks = stored.new_zeros(stored.shape[0], layout.native_bytes)
    for head in layout.heads:
        rows = _part(stored, head.rows_start, head.num_values, form.dtype).float()
        scale = _part(stored, head.scale_start, 1, torch.float32)
        _part(blocks, head.native_start, head.num_values, layout.dtype).copy_((rows * scale).to(layout.dtype))
    return blocks


def _part(blocks: Tensor, start: int, num_values: int, dtype: torch.dtype) -> Tensor:
    """Values of every block from a byte on, as a view [num_blocks, num_values]."""
    return blocks[:, start : start + num_values * dtype.itemsize].view(dtype)
