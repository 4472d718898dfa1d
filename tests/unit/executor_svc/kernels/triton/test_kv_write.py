"""KV writes in Triton's interpreter against plain torch."""

import pytest
import torch

from executor_svc.kernels.batch import LayerCache, Rotary
from executor_svc.kernels.reference import rotate
from executor_svc.kernels.triton.kv_write import rope_write_kv, write_kv


def poisoned_cache(num_kv_heads: int, head_dim_k: int, head_dim_v: int, block_size: int = 16) -> LayerCache:
    key_size, value_size = num_kv_heads * block_size * head_dim_k, num_kv_heads * block_size * head_dim_v
    storage = torch.full((6, key_size + 64 + value_size), float("nan"))
    return LayerCache(
        storage[:, :key_size].view(6, num_kv_heads, block_size, head_dim_k),
        storage[:, key_size + 64 :].view(6, num_kv_heads, block_size, head_dim_v),
    )


def check_written(cache: LayerCache, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Exactly the slots of the tokens hold key and value; everything else is as poisoned as before."""
    block_size = cache.value.shape[2]
    kept = slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    for part, wanted in ((cache.key, key), (cache.value, value)):
        torch.testing.assert_close(part[blocks, :, offsets], wanted[kept], atol=1e-5, rtol=1e-5)
        rest = part.clone()
        rest[blocks, :, offsets] = float("nan")
        assert rest.isnan().all()


def normed(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().mean(2, keepdim=True) + 1e-3) * (weight + 0.5)


@pytest.mark.parametrize(("num_kv_heads", "head_dim_k", "head_dim_v", "block_size"), [(2, 16, 16, 16), (3, 24, 10, 5)])
def test_keys_and_values_go_to_their_slots(num_kv_heads: int, head_dim_k: int, head_dim_v: int, block_size: int) -> None:
    cache = poisoned_cache(num_kv_heads, head_dim_k, head_dim_v, block_size)
    slots = torch.randperm(6 * block_size)[:5]
    slots[1] = -1
    wide = torch.randn(5, num_kv_heads * head_dim_k + 7)
    key = wide[:, 3 : 3 + num_kv_heads * head_dim_k].view(5, num_kv_heads, head_dim_k)
    value = torch.randn(5, num_kv_heads, head_dim_v)
    write_kv(key, value, slots, cache)
    check_written(cache, slots, key, value)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("table", [False, True], ids=["rows", "table"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"), [(4, 2, 16, 16), (9, 3, 20, 12), (2, 1, 80, 80), (1, 1, 96, 24)]
)
def test_one_launch_norms_turns_and_writes(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, table: bool, norm: bool
) -> None:
    num_tokens = 3
    cache = poisoned_cache(num_kv_heads, head_dim, head_dim)
    slots = torch.randperm(96)[:num_tokens]
    slots[2] = -1
    angles = torch.randn(10 if table else num_tokens, rotary_dim)
    rotary = Rotary(angles.cos(), angles.sin())
    positions = torch.tensor([7, 0, 9]) if table else None
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    weights = (torch.randn(head_dim), torch.randn(head_dim))
    out = torch.full((num_tokens, num_heads + (num_kv_heads if table else 0), head_dim), float("nan"))
    key_out = torch.full((num_tokens, num_kv_heads, head_dim), float("nan"))
    rope_write_kv(
        qkv,
        positions,
        slots,
        cache,
        out,
        key_out=None if table else key_out,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary=rotary,
        q_norm_weight=weights[0] if norm else None,
        k_norm_weight=weights[1] if norm else None,
        norm_eps=1e-3,
        norm_weight_offset=0.5,
    )
    heads = qkv.double().view(num_tokens, -1, head_dim)
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norm:
        query, key = normed(query, weights[0]), normed(key, weights[1])
    rows = rotary if positions is None else Rotary(rotary.cos[positions], rotary.sin[positions])
    torch.testing.assert_close(out[:, :num_heads], rotate(query, rows).float(), atol=1e-5, rtol=1e-5)
    keys = out[:, num_heads:] if table else key_out
    torch.testing.assert_close(keys, rotate(key, rows).float(), atol=1e-5, rtol=1e-5)
    check_written(cache, slots, rotate(key, rows).float(), value.float())


def test_many_tokens_take_several_heads_per_program() -> None:
    cache = poisoned_cache(1, 16, 16)
    num_tokens = 40
    slots = torch.randperm(96)[:num_tokens]
    angles = torch.randn(num_tokens, 16)
    rotary = Rotary(angles.cos(), angles.sin())
    few = {"many_rows": 10_000, "heads_per_program": 4, "num_warps": 4}
    few_out, many_out = torch.empty(num_tokens, 3, 16), torch.empty(num_tokens, 3, 16)
    qkv = torch.randn(num_tokens, 5 * 16)
    for out, config in ((few_out, few), (many_out, {**few, "many_rows": 1})):
        rope_write_kv(qkv, None, slots, cache, out, num_heads=3, num_kv_heads=1, head_dim=16, rotary=rotary, config=config)
    assert torch.equal(few_out, many_out)


def test_all_heads_can_go_to_one_place() -> None:
    cache, slots, qkv = poisoned_cache(2, 20, 20), torch.randperm(96)[:3], torch.randn(3, 7 * 20)
    angles = torch.randn(3, 12)
    rotary = Rotary(angles.cos(), angles.sin())
    out = torch.full((3, 7, 20), float("nan"))
    rope_write_kv(qkv, None, slots, cache, out, num_heads=3, num_kv_heads=2, head_dim=20, rotary=rotary)
    heads = qkv.view(3, 7, 20)
    turned, values = rotate(heads[:, :5].double(), rotary).float(), heads[:, 5:]
    torch.testing.assert_close(out, torch.cat([turned, values], 1), atol=1e-5, rtol=1e-5)
    check_written(cache, slots, turned[:, 3:], values)


def test_shapes_that_do_not_fit_are_refused() -> None:
    cache, slots = poisoned_cache(1, 16, 16), torch.zeros(2, dtype=torch.int64)
    rotary = Rotary(torch.ones(2, 18), torch.ones(2, 18))
    with pytest.raises(ValueError, match="qkv"):
        rope_write_kv(
            torch.ones(2, 60), None, slots, cache, torch.empty(2, 2, 16), num_heads=2, num_kv_heads=1, head_dim=16, rotary=rotary
        )
    with pytest.raises(ValueError, match="rotary"):
        rope_write_kv(
            torch.ones(2, 64), None, slots, cache, torch.empty(2, 2, 16), num_heads=2, num_kv_heads=1, head_dim=16, rotary=rotary
        )
