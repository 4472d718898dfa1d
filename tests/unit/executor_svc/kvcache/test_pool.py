"""The device pool: views of one memory, aligned, whole blocks as bytes."""

from dataclasses import dataclass

import pytest
import torch

from common.errors import StartupError
from common.ids import BlockId
from executor_svc.kernels.e4m3 import E4M3, exponents_of
from executor_svc.kernels.layout import ROWS_OF_E4M3
from executor_svc.kvcache.cuda_pool import CudaKvPool
from executor_svc.kvcache.pool import KvPool, block_bytes


@dataclass(frozen=True)
class Shape:
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int


LAYERS = [Shape(3, 64, 64), Shape(1, 16, 12), Shape(5, 7, 9)]


def make_pool(num_blocks: int = 6, block_size: int = 16, dtype: torch.dtype = torch.float32) -> KvPool:
    return KvPool(LAYERS, num_blocks, block_size, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_layers_of_any_shape_are_aligned_views(dtype: torch.dtype, block_size: int) -> None:
    pool = make_pool(block_size=block_size, dtype=dtype)

    pool.check_integrity()
    for shape, cache in zip(LAYERS, pool.layer_caches, strict=True):
        assert cache.key.shape == (6, shape.num_kv_heads, shape.head_dim_k, block_size)
        assert cache.value.shape == (6, shape.num_kv_heads, block_size, shape.head_dim_v)
        assert cache.key[0].is_contiguous()
        assert cache.value[0].is_contiguous()
        assert cache.key.dtype == cache.value.dtype == dtype


def test_no_two_parts_share_a_byte() -> None:
    pool = make_pool()
    parts = [part for cache in pool.layer_caches for part in (cache.key, cache.value)]
    for number, part in enumerate(parts, start=1):
        part.fill_(number)

    for number, part in enumerate(parts, start=1):
        assert (part == number).all()


def test_a_block_view_is_the_memory_itself() -> None:
    pool = make_pool()
    pool.layer_caches[1].value[4] = 3.0
    view = pool.block_view(BlockId(4))
    saved = bytes(view)

    pool.zero()
    view[:] = saved

    assert len(view) == pool.block_bytes == block_bytes(LAYERS, 16, torch.float32)
    assert (pool.layer_caches[1].value[4] == 3.0).all()
    assert not pool.layer_caches[1].value[3].any()


def test_copies_are_carried_out_one_after_the_other() -> None:
    pool = make_pool()
    pool.layer_caches[0].key[0] = 1.0

    pool.copy_blocks([(BlockId(0), BlockId(1)), (BlockId(1), BlockId(2))])

    assert (pool.layer_caches[0].key[:3] == 1.0).all()
    assert not pool.layer_caches[0].key[3:].any()


def test_a_block_outside_the_pool_is_refused() -> None:
    with pytest.raises(IndexError, match="block 6"):
        make_pool().block_view(BlockId(6))


def test_a_pool_beyond_all_memory_names_the_setting_to_lower() -> None:
    with pytest.raises(StartupError, match="lower --kv-memory-bytes or --num-blocks"):
        make_pool(num_blocks=1 << 38)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_a_pool_of_e4m3_has_nearly_twice_the_blocks(head_dim: int) -> None:
    layers = [Shape(8, head_dim, head_dim)] * 16

    assert block_bytes(layers, 16, torch.bfloat16) / block_bytes(layers, 16, E4M3) > 1.9


def test_exponents_lie_behind_the_rows_of_their_part() -> None:
    layers = [Shape(3, 64, 64), Shape(1, 16, 12)]
    pool = CudaKvPool(layers, 4, 16, E4M3, ROWS_OF_E4M3, torch.device("cpu"))
    parts = [part for cache in pool.layer_caches for part in (cache.key, cache.value)]
    for number, part in enumerate(parts, start=1):
        part.view(torch.uint8).fill_(number)
        exponents_of(part).fill_(number + 100)

    pool.check_integrity()
    for number, part in enumerate(parts, start=1):
        assert (part.view(torch.uint8) == number).all()
        assert (exponents_of(part) == number + 100).all()
