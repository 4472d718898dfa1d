"""The model's tokenizer, from the tokenizer.json of its folder. Knows text and ids; not where they come from or go to."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from common.errors import StartupError


class Tokenizer:
    """Encodes and decodes like the model's own tokenizer. Safe to use from several threads.

    Attributes:
        decoder: the decoder's description in tokenizer.json, for the incremental detokenizer.
        special_ids: ids that skip_special_tokens leaves out.
        longest_token_bytes: no token stands for more bytes of text than this.
    """

    def __init__(self, tokenizer: HfTokenizer):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.decoder: dict[str, object] = json.loads(tokenizer.to_str()).get("decoder") or {}
        self.special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self.longest_token_bytes = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer | None":
        """Reads a model folder.

        Returns:
            None: the folder has no tokenizer.json; such a model is asked with token ids.

        Raises:
            StartupError: the file is there and cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        try:
            return cls(HfTokenizer.from_file(str(path)))
        except Exception as error:  # the library raises plain Exception
            raise StartupError(f"cannot read {path}: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. With add_special_tokens, those that the model expects around a prompt are added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids; ids that the tokenizer does not have stand for nothing."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's entry of an id, in the tokenizer's own spelling; None if there is none."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token
