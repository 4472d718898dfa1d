"""Token ids as bytes, for messages that carry whole prompts: uint32, little endian. Knows nothing else.

A field of numbers costs Python 0.05 us a token at either end; 64 prompts of 8,000 tokens are 50 ms before their first step.
"""

import array
import sys
from collections.abc import Sequence

_ITEM_BYTES = 4


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """The bytes of token ids, each 0 <= id < 2**32."""
    packed = array.array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(data: bytes) -> "array.array[int]":
    """The token ids of pack_token_ids' bytes.

    Raises:
        ValueError: it is no whole number of ids.
    """
    if len(data) % _ITEM_BYTES:
        raise ValueError(f"{len(data)} bytes are no whole number of token ids of {_ITEM_BYTES} bytes")
    unpacked = array.array("I")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked
