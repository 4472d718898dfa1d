"""The ends of a step: token ids on their way in, and the largest logit of each row on its way out, one launch each.

Knows tensors. Ids and choices are those of executor_svc/cuda/sampler.py: a row without a choice becomes -1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.kernels.triton.launch import Launch

_BLOCK = 4096
_MAX_PARTS = 64
_NONE = 0x7FFFFFFF


@Launch
@triton.jit
def _read_kernel(input_ids, last_tokens, out, num_tokens, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_tokens
    ids = tl.load(input_ids + at, mask=mask, other=0)
    from_row = mask & (ids < 0)
    last = tl.load(last_tokens + (-ids - 1), mask=from_row, other=0)
    tl.store(out + at, tl.where(from_row, last, ids), mask=mask)


@Launch
@triton.jit
def _greedy_kernel(
    logits, rows, last_tokens, out, part_values, part_ids, arrived, stride,
    size: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    best = tl.full((), float("-inf"), tl.float32)
    best_id = tl.full((), NONE, tl.int32)
    for start in range(0, PART, BLOCK):
        at = part * PART + start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * stride + at, mask=at < size, other=float("-inf")).to(tl.float32)
        # What is no number counts as infinite: either means that the row has no choice.
        values = tl.where(values == values, values, float("inf"))
        largest = tl.max(values, 0)
        first = tl.min(tl.where(values == largest, at, NONE), 0)
        best_id = tl.where(largest > best, first, best_id)
        best = tl.maximum(best, largest)
    if PARTS > 1:
        tl.store(part_values + row * PARTS + part, best)
        tl.store(part_ids + row * PARTS + part, best_id)
        # The last program of a row to arrive looks at all parts.
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == PARTS - 1:
            tl.store(arrived + row, 0)
            index = tl.arange(0, PARTS)
            values = tl.load(part_values + row * PARTS + index)
            ids = tl.load(part_ids + row * PARTS + index)
            best = tl.max(values, 0)
            best_id = tl.min(tl.where(values == best, ids, NONE), 0)
            _finish(best, best_id, row, rows, last_tokens, out)
    else:
        _finish(best, best_id, row, rows, last_tokens, out)


@triton.jit
def _finish(best, best_id, row, rows, last_tokens, out):
    has_choice = (best > float("-inf")) & (best < float("inf"))
    tl.store(out + row, tl.where(has_choice, best_id, -1).to(tl.int64))
    tl.store(last_tokens + tl.load(rows + row), tl.where(has_choice, best_id, 0).to(tl.int64))


class TritonTokens:
    """See executor_svc.cuda.sampler.TokenEnds. One launch of choose at a time."""

    def __init__(self, max_num_rows: int, device: torch.device, *, block: int = _BLOCK):
        """Allocates scratch.

        Args:
            max_num_rows: most rows of choose.
            device: of all tensors.
            block: logits that are read at once, a power of 2.
        """
        self._block = block
        self._part_values = torch.empty(max_num_rows, _MAX_PARTS, dtype=torch.float32, device=device)
        self._part_ids = torch.empty(max_num_rows, _MAX_PARTS, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(max_num_rows, dtype=torch.int32, device=device)

    def read(self, input_ids: Tensor, last_tokens: Tensor) -> Tensor:
        """See TokenEnds."""
        out = torch.empty_like(input_ids)
        num_tokens = input_ids.shape[0]
        if num_tokens:
            _read_kernel((triton.cdiv(num_tokens, 256),), input_ids, last_tokens, out, num_tokens, BLOCK=256, num_warps=4)
        return out

    def choose(self, logits: Tensor, rows: Tensor, last_tokens: Tensor) -> Tensor:
        """See TokenEnds."""
        num_rows, size = logits.shape
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        if num_rows > self._arrived.shape[0]:
            raise ValueError(f"logits: {num_rows} rows, there is scratch for {self._arrived.shape[0]}")
        if num_rows:
            num_blocks = triton.cdiv(size, self._block)
            # Few rows are cut into parts, so that the whole device reads them.
            wanted = max(1, min(_MAX_PARTS, 512 // num_rows, num_blocks))
            parts = 1 << (wanted.bit_length() - 1)
            _greedy_kernel(
                (num_rows, parts),
                logits, rows, last_tokens, out, self._part_values, self._part_ids, self._arrived, logits.stride(0),
                size=size, PARTS=parts, PART=triton.cdiv(num_blocks, parts) * self._block, BLOCK=self._block, NONE=_NONE,
                num_warps=8,
            )  # fmt: skip
        return out
