"""Block keys: pinned by golden values, because every process and every stored block has to agree on them."""

from hypothesis import given
from hypothesis import strategies as st

from common.block_hash import KEY_BYTES, chain_keys, kv_fingerprint, root_key

FINGERPRINT = kv_fingerprint({"a": "b"})
ROOT = root_key(FINGERPRINT, "s")

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_fingerprint_is_the_golden_value() -> None:
    assert FINGERPRINT.hex() == "07ffff98129ac1d7b3bf27bbba587a15e476d53e20d7c9c90e3e0a4c3cd86090"


def test_root_key_is_the_golden_value() -> None:
    assert ROOT.hex() == "ecf3c1549d16026326ddd4374c458c4508970fd0c84b34cead6c66255b56f364"


def test_chain_keys_are_the_golden_values() -> None:
    assert [key.hex() for key in chain_keys(ROOT, range(40), 16)] == [
        "80cace92432ec7151b96b75fbcc77a0f4a2275e542eb442547f5b2199c8f1308",
        "73cb26e5eda43c3daa5bf47054be813cf5d963e107992634d1839a8481722c83",
    ]


def test_fingerprint_depends_on_every_part_and_not_on_their_order() -> None:
    parts = {"dtype": "bf16", "weights": "1234"}

    assert kv_fingerprint(parts) == kv_fingerprint(dict(reversed(parts.items())))
    assert len({kv_fingerprint(p) for p in (parts, {**parts, "dtype": "fp32"}, {"dtype": "bf16"}, {})}) == 4


def test_parts_cannot_run_into_each_other() -> None:
    assert kv_fingerprint({"ab": "c"}) != kv_fingerprint({"a": "bc"})
    assert kv_fingerprint({"a": "b", "c": "d"}) != kv_fingerprint({"a": "bcd"})


def test_different_salts_and_fingerprints_share_no_key() -> None:
    roots = [ROOT, root_key(FINGERPRINT), root_key(FINGERPRINT, "t"), root_key(kv_fingerprint({}), "s")]
    chains = [chain_keys(root, range(64), 16) for root in roots]

    assert len({key for chain in chains for key in chain}) == 16


@given(token_ids=token_lists, block_size=st.integers(1, 20))
def test_only_full_blocks_have_keys(token_ids: list[int], block_size: int) -> None:
    keys = chain_keys(ROOT, token_ids, block_size)

    assert len(keys) == len(token_ids) // block_size
    assert all(len(key) == KEY_BYTES for key in keys)


@given(token_ids=token_lists, block_size=st.integers(1, 20), cut=st.integers(0, 70))
def test_chain_can_be_continued_from_any_block(token_ids: list[int], block_size: int, cut: int) -> None:
    keys = chain_keys(ROOT, token_ids, block_size)
    num_head = min(cut, len(keys))

    parent = keys[num_head - 1] if num_head else None
    assert keys[:num_head] + chain_keys(ROOT, token_ids[num_head * block_size :], block_size, parent=parent) == keys


@given(token_ids=st.lists(st.integers(0, 2**32 - 1), min_size=48, max_size=48), position=st.integers(0, 47))
def test_a_key_names_everything_before_its_end(token_ids: list[int], position: int) -> None:
    keys = chain_keys(ROOT, token_ids, 16)
    token_ids[position] ^= 1

    changed = [a != b for a, b in zip(keys, chain_keys(ROOT, token_ids, 16), strict=True)]
    assert changed == [block >= position // 16 for block in range(3)]
