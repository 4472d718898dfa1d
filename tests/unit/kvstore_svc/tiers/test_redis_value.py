"""A value in Redis says by itself which block it is."""

from hypothesis import given
from hypothesis import strategies as st

from common.block_hash import chain_keys, kv_fingerprint, root_key
from common.ids import BlockKey
from kvstore_svc.core.block import Layout
from kvstore_svc.tiers.base import StoredBlock
from kvstore_svc.tiers.redis_value import HEADER_BYTES, KEY_PREFIX, pack_header, redis_key, unpack_header

keys = st.binary(min_size=32, max_size=32).map(BlockKey)
stored_blocks = st.builds(
    StoredBlock,
    keys,
    st.builds(Layout, st.binary(min_size=32, max_size=32), st.integers(1, 2**40)),
    st.binary(min_size=16, max_size=16),
)


@given(stored_blocks)
def test_a_header_says_what_was_put_into_it(block: StoredBlock) -> None:
    header = pack_header(block)

    assert len(header) == HEADER_BYTES
    assert unpack_header(header, block.key) == block


@given(stored_blocks, keys)
def test_a_header_of_another_block_is_none(block: StoredBlock, key: BlockKey) -> None:
    assert (unpack_header(pack_header(block), key) is not None) == (key == block.key)


@given(stored_blocks, st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_header_with_a_flipped_bit_is_none(block: StoredBlock, bit: int) -> None:
    header = bytearray(pack_header(block))
    header[bit // 8] ^= 1 << bit % 8

    assert unpack_header(bytes(header), block.key) is None


@given(stored_blocks, st.integers(0, HEADER_BYTES - 1))
def test_a_header_that_is_cut_off_is_none(block: StoredBlock, length: int) -> None:
    assert unpack_header(pack_header(block)[:length], block.key) is None


def test_names_of_other_weights_dtypes_tenants_or_tokens_are_others() -> None:
    def name(*, weights: str = "w", dtype: str = "float32", salt: str = "", token_ids: tuple[int, int] = (1, 2)) -> bytes:
        fingerprint = kv_fingerprint({"weights": weights, "dtype": dtype})
        (key,) = chain_keys(root_key(fingerprint, salt), token_ids, 2)
        return redis_key(key)

    names = [name(), name(weights="updated"), name(dtype="float8_e4m3fn"), name(salt="tenant"), name(token_ids=(1, 3))]

    assert len(set(names)) == len(names)
    assert all(found.startswith(KEY_PREFIX) and len(bytes.fromhex(found[len(KEY_PREFIX) :].decode())) == 32 for found in names)
