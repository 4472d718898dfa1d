"""Tokens without their ids, for recordings. Knows block keys; no file and no scheduler.

The core decides by lengths, stop tokens and equal block keys; which words they stand for does not matter to it. So a recording
has substitutes: of a block's last two tokens a digest of the block up to that token, under a secret that nobody keeps, and 0
of all others. Equal blocks after equal beginnings have equal substitutes, whether they came as a prompt or were drawn. Chains
of substitutes are equal exactly where the chains of tokens are, and that is all that can be told from them.
"""

import array
from collections.abc import Sequence
from dataclasses import dataclass

import blake3

from common.block_hash import chain_keys
from common.ids import BlockKey
from common.token_ids import pack_token_ids

_HASHED = 1 << 31
"""Set in every digest, so that it is neither of the two below."""
PLAIN_TOKEN = 0
STOP_TOKEN = 1


@dataclass(frozen=True, slots=True)
class Outline:
    """See octavo.recording.v1.Outline."""

    num_tokens: int
    blocks: tuple[int, ...] = ()
    tail: int = 0

    def token_ids(self, block_size: int) -> tuple[int, ...]:
        """Substitutes of all tokens."""
        tokens = array.array("L", bytes(self.num_tokens * array.array("L").itemsize))
        for index, both in enumerate(self.blocks):
            end = (index + 1) * block_size
            tokens[end - 1] = both >> 32
            if block_size > 1:
                tokens[end - 2] = both & 0xFFFFFFFF
        if self.tail:
            tokens[-1] = self.tail
        return tuple(tokens)


class Outliner:
    """Makes substitutes under one secret.

    Args:
        secret: 32 random bytes, the same for all recordings between which requests move.
        block_size: tokens per block.
        is_keyed: whether blocks have keys; without, no token matters.
    """

    def __init__(self, secret: bytes, block_size: int, *, is_keyed: bool):
        self.block_size = block_size
        self.is_keyed = is_keyed
        self._secret = secret

    def outline(self, root: BlockKey, token_ids: Sequence[int], keys: Sequence[BlockKey]) -> Outline:
        """Of a chain from its start.

        Args:
            root: of its keys.
            token_ids: all of them.
            keys: of its full blocks.
        """
        if not self.is_keyed:
            return Outline(len(token_ids))
        size, data = self.block_size, pack_token_ids(token_ids)
        parents = [root, *keys]
        blocks = []
        for index, key in enumerate(keys):
            begin = 4 * size * index
            before_last = self.digest(parents[index] + data[begin : begin + 4 * (size - 1)]) if size > 1 else 0
            blocks.append(self.digest(key) << 32 | before_last)
        rest = data[4 * size * len(keys) :]
        is_nearly_full = size > 1 and len(rest) == 4 * (size - 1)
        return Outline(len(token_ids), tuple(blocks), self.digest(parents[-1] + rest) if is_nearly_full else 0)

    def root(self, root: BlockKey) -> int:
        """A number of 64 bits for a root."""
        return int.from_bytes(blake3.blake3(root, key=self._secret).digest()[:8], "little")

    def digest(self, content: bytes) -> int:
        """A substitute for the last token of a content."""
        return int.from_bytes(blake3.blake3(content, key=self._secret).digest()[:4], "little") | _HASHED


class DrawnTokens:
    """The end of one sequence's chain, token by token.

    Args:
        outliner: makes substitutes.
        root: of its keys.
        token_ids, keys: what is known of the sequence, and the keys of its full blocks.
    """

    def __init__(self, outliner: Outliner, root: BlockKey, token_ids: Sequence[int], keys: Sequence[BlockKey]):
        self._outliner = outliner
        self._root = root
        self._parent = keys[-1] if keys else root
        self._begun = list(token_ids[len(keys) * outliner.block_size :]) if outliner.is_keyed else []

    def take(self, token_id: int, *, is_stop: bool) -> int:
        """The substitute of the next token."""
        if not self._outliner.is_keyed:
            return STOP_TOKEN if is_stop else PLAIN_TOKEN
        size = self._outliner.block_size
        self._begun.append(token_id)
        if len(self._begun) == size:
            self._parent = chain_keys(self._root, self._begun, size, parent=self._parent)[0]
            self._begun.clear()
            return self._outliner.digest(self._parent)
        if len(self._begun) == size - 1:
            return self._outliner.digest(self._parent + pack_token_ids(self._begun))
        return STOP_TOKEN if is_stop else PLAIN_TOKEN
