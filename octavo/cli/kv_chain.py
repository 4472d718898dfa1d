"""The keys of a prompt's blocks, for `octavo kv export`. Knows token ids, layouts and salts; asks no store."""

import re
from collections.abc import Iterable, Sequence

from common.block_hash import chain_keys, chain_salt, root_key
from common.errors import InvalidParameter

_MAX_TOKEN_ID = 2**32 - 1


def token_ids_of(text: str) -> list[int]:
    """Token ids that are separated by commas or white space.

    Raises:
        InvalidParameter: there is something else among them, or nothing.
    """
    words = re.split(r"[,\s]+", text.strip(", \t\n"))
    if not all(word.isascii() and word.isdigit() and int(word) <= _MAX_TOKEN_ID for word in words):
        raise InvalidParameter("--tokens", f"{text[:40]!r} are no token ids, like 1,2,3")
    return [int(word) for word in words]


def keys_of(
    token_ids: Sequence[int], fingerprints: Iterable[bytes], *, block_size: int, server_salt: str, cache_salt: str
) -> list[bytes]:
    """Keys of the full blocks of a prompt, of each layout: which model a store's blocks are of, only their keys say.

    Args:
        token_ids: of the prompt.
        fingerprints: of the layouts.
        block_size: tokens per block, of the executors that wrote the blocks.
        server_salt: of their server.
        cache_salt: of the request.

    Raises:
        InvalidParameter: the prompt fills no block.
    """
    if len(token_ids) < block_size:
        raise InvalidParameter("--block-size", f"the prompt has {len(token_ids)} tokens and fills no block of {block_size}")
    salt = chain_salt(server_salt, cache_salt)
    return [key for one in sorted(fingerprints) for key in chain_keys(root_key(one, salt), token_ids, block_size)]
