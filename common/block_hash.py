"""Names of KV blocks: the same function in every process, pinned by golden values in its test.

Knows token ids and digests. Does not know models, pools or tiers. A key is a BLAKE3 keyed hash, so nobody without the
root can compute or guess one: the root carries the model, the layout and the tenant's salt.

    root          = blake3(key=kv_fingerprint, "octavo/root/1" + salt)
    key of block i = blake3(key=root, key of block i-1 (root for i = 0) + token ids as uint32 little endian)
"""

import array
import sys
from collections.abc import Sequence
from typing import cast

import blake3

from common.ids import BlockKey

KEY_BYTES = 32


def kv_fingerprint(parts: dict[str, str]) -> bytes:
    """Digest of everything that decides what a block's bytes mean.

    Args:
        parts: by name, for example weights digest, adapter digest, dtype, quantisation, block size, layout version, rope
            settings and model revision. Order does not matter.

    Returns:
        32 bytes.
    """
    digest = blake3.blake3(b"octavo/fingerprint/1")
    for name in sorted(parts):
        for text in (name, parts[name]):
            data = text.encode()
            digest.update(len(data).to_bytes(4, "little"))
            digest.update(data)
    return digest.digest()


def root_key(fingerprint: bytes, salt: str = "") -> BlockKey:
    """The parent of a chain's first block.

    Args:
        fingerprint: 32 bytes from kv_fingerprint.
        salt: chains with different salts have no key in common.
    """
    return BlockKey(blake3.blake3(b"octavo/root/1" + salt.encode(), key=fingerprint).digest())


def chain_salt(server_salt: str, cache_salt: str, tenant: str = "") -> str:
    """The salt of a request's root: that of its server, its own, and its tenant's name.

    Lengths keep ("ab", "c") apart from ("a", "bc"). Tenants find none of each other's blocks, nor how fast they would be.
    """
    owner = f"{len(tenant)}/{tenant}/" if tenant else ""
    return f"{owner}{len(server_salt)}:{server_salt}{cache_salt}" if server_salt or cache_salt or tenant else ""


def chain_keys(root: BlockKey, token_ids: Sequence[int], block_size: int, *, parent: BlockKey | None = None) -> list[BlockKey]:
    """Keys of the full blocks of token_ids.

    Args:
        root: from root_key.
        token_ids: each 0 <= id < 2**32; a partly filled last block has no key.
        block_size: tokens per block.
        parent: key of the block before token_ids; None at the start of the chain.

    Returns:
        len(token_ids) // block_size keys, in order of position.
    """
    data = _packed(token_ids)
    step = 4 * block_size
    keys: list[bytes] = []
    previous: bytes = root if parent is None else parent
    for start in range(0, len(token_ids) // block_size * step, step):
        previous = blake3.blake3(previous + data[start : start + step], key=root).digest()
        keys.append(previous)
    return cast(list[BlockKey], keys)


def next_key(root: BlockKey, token_ids: Sequence[int], parent: BlockKey | None) -> BlockKey:
    """The key of one full block; as chain_keys, which this is the short way of."""
    return cast(BlockKey, blake3.blake3((parent or root) + _packed(token_ids), key=root).digest())


def _packed(token_ids: Sequence[int]) -> bytes:
    packed = array.array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
