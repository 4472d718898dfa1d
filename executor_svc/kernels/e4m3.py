"""Rows of e4m3: a key or a value as bytes with one exponent for all of them. The format, said in plain torch.

Knows tensors. Does not know pools or kernels (kernels/triton/e4m3.py writes and reads the same bytes).

```
a part of a block     | rows: e4m3 [num_kv_heads, block_size, head_dim] | exponents: uint8 [num_kv_heads, block_size] |
a value               e4m3 * 2 ** (exponent - 127)
```
The exponent is the smallest that keeps the row's largest value within e4m3, which is a format of 4 exponent bits itself: a factor
between powers of two would not make it more exact. It is bounded, so that kernels can multiply weights by it.
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
BIAS = 127
EXPONENT_RANGE = (BIAS - 60, BIAS + 60)
"""Values of less than 2 ** -70 become zero, those of more than 448 * 2 ** 60 become that."""


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype of keys and values as settings and info name it."""
    return "fp8_e4m3" if dtype == E4M3 else str(dtype).removeprefix("torch.")


def row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one key or value in a block, its exponent included if it is e4m3."""
    return head_dim * dtype.itemsize + (1 if dtype == E4M3 else 0)


def exponents_of(part: Tensor) -> Tensor:
    """The exponents behind the rows of a part of a pool, as a view.

    Args:
        part: e4m3 [num_blocks, num_kv_heads, block_size, head_dim], strided over dimension 0.

    Returns:
        uint8 [num_blocks, num_kv_heads, block_size].
    """
    num_blocks, num_kv_heads, block_size, head_dim = part.shape
    behind = part.storage_offset() + num_kv_heads * block_size * head_dim
    return part.view(torch.uint8).as_strided((num_blocks, num_kv_heads, block_size), (part.stride(0), block_size, 1), behind)


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., head_dim] of any float dtype as e4m3 of the same shape and exponents, uint8 [...]."""
    rows = rows.float()
    mantissa, power = torch.frexp(rows.abs().amax(-1))  # largest = mantissa * 2 ** power, mantissa in [0.5, 1)
    exponents = power - 9 + (mantissa > LARGEST / 512).int() + BIAS
    exponents = torch.where(mantissa == 0, EXPONENT_RANGE[0], exponents).clamp(*EXPONENT_RANGE)
    scaled = torch.ldexp(rows, (BIAS - exponents)[..., None]).clamp(-LARGEST, LARGEST)
    return scaled.to(E4M3), exponents.to(torch.uint8)


def decode(rows: Tensor, exponents: Tensor) -> Tensor:
    """What encode took, rounded: float32 [..., head_dim]."""
    return torch.ldexp(rows.float(), (exponents.int() - BIAS)[..., None])
