"""Blocks of a pool as stored blocks and back, on the device, so that the link carries the small form.

Knows bytes and where they lie (kvcache/stored_form.py says what they mean). Does not know streams, host memory or stores.
A program takes one head of one block: 2,048 values of a Llama.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.triton.e4m3 import from_e4m3, to_e4m3
from executor_svc.kernels.triton.launch import Launch
from executor_svc.kvcache.stored_form import SMALLEST, StoredForm, StoredLayout

_MAX_TILE = 4096
_SMALLEST = tl.constexpr(SMALLEST)
_STARTS = tl.constexpr(4)
"""Numbers of a head in the table: values, and where they, their bytes and their scale begin."""


class StoredFormKernels:
    """One form for the blocks of one pool. Everything is queued on the current stream."""

    def __init__(self, form: StoredForm, layout: StoredLayout, device: torch.device | str):
        """Takes the memory of a small table.

        Args:
            form: of stored blocks.
            layout: of both kinds of blocks.
            device: of both.
        """
        itemsize = layout.dtype.itemsize
        rows = [(head.num_values, head.native_start // itemsize, head.rows_start, head.scale_start // 4) for head in layout.heads]
        self.layout = layout
        self._table = torch.tensor(rows, dtype=torch.int64).to(device)
        most = max(head.num_values for head in layout.heads)
        self._constants: dict[str, Any] = {
            "LARGEST": form.largest,
            "INT8": form.dtype == torch.int8,
            "TILE": min(_MAX_TILE, triton.next_power_of_2(most)),
            "num_warps": 4,
        }

    def compile(self, blocks: Tensor, stored: Tensor) -> None:
        """Has both kernels compiled, on a pool that holds nothing yet: block 0 goes there and back."""
        first = torch.zeros(1, dtype=torch.int64, device=blocks.device)
        self.compress(blocks, first, stored)
        self.restore(stored, first, blocks)

    def compress(self, blocks: Tensor, block_ids: Tensor, stored: Tensor) -> None:
        """Writes some blocks of a pool in their stored form; bytes between parts stay as they are.

        Args:
            blocks: uint8 [num_blocks, native_bytes], the pool.
            block_ids: int64 [count].
            stored: uint8 [at least count, stored_bytes]; the first count are written.
        """
        self._launch(_compress_kernel, blocks, block_ids, stored)

    def restore(self, stored: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
        """Writes stored blocks into blocks of a pool; arguments as in compress."""
        self._launch(_restore_kernel, blocks, block_ids, stored)

    def _launch(self, kernel: Launch, blocks: Tensor, block_ids: Tensor, stored: Tensor) -> None:
        if block_ids.shape[0] == 0:
            return
        kernel(
            (block_ids.shape[0], self._table.shape[0]),
            blocks.view(self.layout.dtype),
            stored,
            stored.view(torch.float32),
            block_ids,
            self._table,
            self.layout.native_bytes // self.layout.dtype.itemsize,
            self.layout.stored_bytes,
            **self._constants,
        )


@Launch
@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def _compress_kernel(
    values_ptr,
    rows_ptr,
    scales_ptr,
    ids_ptr,
    table_ptr,
    block_values,
    stored_bytes,
    LARGEST: tl.constexpr,
    INT8: tl.constexpr,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    head_ptr = table_ptr + tl.program_id(1) * _STARTS
    count = tl.load(head_ptr)
    values_ptr += tl.load(ids_ptr + place) * block_values + tl.load(head_ptr + 1)
    rows_ptr += place * stored_bytes + tl.load(head_ptr + 2)
    at = tl.arange(0, TILE)
    highest = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, count, TILE, num_stages=1):
        values = tl.load(values_ptr + start + at, mask=start + at < count, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, tl.abs(values))
    largest = tl.max(highest, 0)
    is_something = largest > _SMALLEST
    divisor = tl.where(is_something, largest, 1.0)
    factor = tl.where(is_something, tl.div_rn(divisor * 0.0 + LARGEST, divisor), 0.0)
    scale = tl.where(is_something, tl.div_rn(largest, largest * 0.0 + LARGEST), 0.0)
    tl.store(scales_ptr + place * (stored_bytes // 4) + tl.load(head_ptr + 3), scale)
    for start in tl.range(0, count, TILE, num_stages=1):
        values = tl.load(values_ptr + start + at, mask=start + at < count, other=0.0).to(tl.float32)
        scaled = tl.minimum(tl.maximum(values * factor, -LARGEST), LARGEST)
        code = _to_int8(scaled) if INT8 else to_e4m3(scaled)
        tl.store(rows_ptr + start + at, code, mask=start + at < count)


@triton.jit
def _to_int8(values):
    """Float32 values of at most 127 as bytes. The last bit of 1.5 * 2 ** 23 is worth 1: adding it rounds, ties to even."""
    return ((values + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.uint8)


@Launch
@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def _restore_kernel(
    values_ptr,
    rows_ptr,
    scales_ptr,
    ids_ptr,
    table_ptr,
    block_values,
    stored_bytes,
    LARGEST: tl.constexpr,
    INT8: tl.constexpr,
    TILE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    head_ptr = table_ptr + tl.program_id(1) * _STARTS
    count = tl.load(head_ptr)
    values_ptr += tl.load(ids_ptr + place) * block_values + tl.load(head_ptr + 1)
    rows_ptr += place * stored_bytes + tl.load(head_ptr + 2)
    scale = tl.load(scales_ptr + place * (stored_bytes // 4) + tl.load(head_ptr + 3))
    at = tl.arange(0, TILE)
    for start in tl.range(0, count, TILE, num_stages=1):
        codes = tl.load(rows_ptr + start + at, mask=start + at < count, other=0)
        values = codes.to(tl.int8).to(tl.float32) if INT8 else from_e4m3(codes)
        tl.store(values_ptr + start + at, (values * scale).to(values_ptr.dtype.element_ty), mask=start + at < count)
