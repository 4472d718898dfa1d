"""Steps of steps.py over a cache of e4m3, and what the reference makes of the same rounded rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from executor_svc.kernels.batch import LayerCache
from executor_svc.kernels.e4m3 import decode, encode, exponents_of
from tests.unit.executor_svc.kernels.batches import Shape, Step
from tests.unit.executor_svc.kernels.triton.steps import expected, make_rows_step


@dataclass(frozen=True)
class E4m3Step:
    """A step over a cache of e4m3, and the same over what that cache holds in float32."""

    step: Step
    plain: Step

    def expected(
        self, *, scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """The reference's output, float64."""
        return expected(self.plain, scale=scale, window=window, softcap=softcap, sinks=sinks)[0]

    def written(self) -> "E4m3Step":
        """The step with its keys and values in the cache already."""
        _, cache = expected(self.plain, scale=1.0)
        return E4m3Step(replace(self.step, cache=e4m3_cache(cache)), replace(self.plain, cache=cache))


def e4m3_cache(cache: LayerCache, device: str = "cpu") -> LayerCache:
    """The rows of a cache as e4m3, in one storage as in the pool; rows of NaN get a wild exponent."""
    num_blocks = cache.value.shape[0]
    storage = torch.full((num_blocks, sum(_part_bytes(part) for part in (cache.key, cache.value))), 0x7F, dtype=torch.uint8)
    storage = storage.to(device)
    parts, start = [], 0
    for part in (cache.key, cache.value):
        rows = storage[:, start : start + part[0].numel()].view(torch.float8_e4m3fn).view(part.shape)
        found, exponents = encode(part)
        rows.copy_(found)
        exponents_of(rows).copy_(torch.where(part.isnan().any(-1), 255, exponents))
        parts.append(rows)
        start += _part_bytes(part)
    return LayerCache(*parts)


def _part_bytes(part: Tensor) -> int:
    """Of the rows of a part and their exponents, as the pool rounds it up."""
    num_kv_heads, block_size, head_dim = part.shape[1:]
    return -(-num_kv_heads * block_size * (head_dim + 1) // 64) * 64


def plain_cache(cache: LayerCache) -> LayerCache:
    """What a cache of e4m3 holds, float32; NaN where it is poisoned."""
    return LayerCache(*(decode(part, exponents_of(part)) for part in (cache.key, cache.value)))


def rounded(rows: Tensor) -> Tensor:
    """Rows as a cache of e4m3 keeps them, float32."""
    return decode(*encode(rows))


def make_e4m3_step(shape: Shape, seq_lens: Sequence[int], query_lens: Sequence[int], spread: float = 1.0) -> E4m3Step:
    """As make_rows_step. Keys and values of each row are larger or smaller by up to 2 ** spread."""
    step = make_rows_step(shape, seq_lens, query_lens)
    parts = [part * torch.exp2(torch.empty(part.shape[:-1]).uniform_(-spread, spread))[..., None] for part in _parts(step)]
    cache = LayerCache(parts[0], parts[1])
    key, value = parts[2].to(shape.dtype), parts[3].to(shape.dtype)
    stored = e4m3_cache(cache)
    plain = Step(step.query.float(), rounded(key), rounded(value), plain_cache(stored), step.batch)
    return E4m3Step(Step(step.query, key, value, stored, step.batch), plain)


def _parts(step: Step) -> tuple[Tensor, ...]:
    return step.cache.key, step.cache.value, step.key, step.value
