"""Token ids to text as they come, one instance a sequence. Knows the tokenizer; not when a sequence ends.

The pieces put together are what decoding all ids at once gives. A piece ends on a whole character: bytes of an unfinished
character wait for the rest. The work is linear in the number of tokens.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from scheduler_svc.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 8


class Detokenizer(Protocol):
    """Text of one sequence, piece by piece."""

    def push(self, token_id: int) -> str:
        """The text that the next token completes; empty while a character is unfinished."""
        ...

    def flush(self) -> str:
        """What is left at the end; bytes that never became a character as U+FFFD."""
        ...


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer, and remembers what its tokens are in bytes."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._bytes = _TokenBytes(tokenizer) if _is_byte_level(tokenizer.decoder) else None

    def new(self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool) -> Detokenizer:
        """A detokenizer for what follows the prompt.

        Args:
            prompt_token_ids: decoders that treat the first token of a text in their own way (a leading space) see the
                prompt's end before the first output token.
            skip_special_tokens: special tokens stand for nothing.
        """
        skipped = self._tokenizer.special_ids if skip_special_tokens else frozenset()
        if self._bytes is not None:
            return _ByteLevelDetokenizer(self._bytes, skipped)
        return _WindowDetokenizer(self._tokenizer, skipped, prompt_token_ids)


def _is_byte_level(decoder: dict[str, object]) -> bool:
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders")
        return isinstance(parts, list) and len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _byte_level_alphabet() -> dict[str, int]:
    """The byte for each character of byte-level BPE: printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class _TokenBytes(dict[int, bytes]):
    """Bytes by token id, filled as ids are met."""

    _ALPHABET = _byte_level_alphabet()

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.token(token_id) or ""
        try:
            data = bytes(self._ALPHABET[character] for character in token)
        except KeyError:  # an added token, spelled as it reads
            data = token.encode()
        self[token_id] = data
        return data


class _ByteLevelDetokenizer:
    """For byte-level BPE: every token is some bytes, whatever stands around it."""

    def __init__(self, token_bytes: _TokenBytes, skipped: frozenset[int]):
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _WindowDetokenizer:
    """For every other decoder: decodes a short window with the new token and without it, and takes the difference."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], prompt_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._skipped = skipped
        # Ids of the window: the first num_context are out already and only there for what they do to their neighbours.
        self._window = [i for i in prompt_token_ids[-_CONTEXT_TOKENS:] if i not in skipped]
        self._context_text = self._decode(self._window)
        self._num_context = len(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token_id in self._skipped or token is None:
            return ""
        self._window.append(token_id)
        # Byte-fallback decoders judge a run of byte tokens as a whole, so the whole run waits for its end.
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return ""
        return self._take(final=False)

    def flush(self) -> str:
        return self._take(final=True) if len(self._window) > self._num_context else ""

    def _take(self, *, final: bool) -> str:
        text = self._decode(self._window)
        if text.endswith("\ufffd") and not final:
            return ""
        new_text = text[len(self._context_text) :]
        self._window = self._window[self._num_context :][-_CONTEXT_TOKENS:]
        self._context_text = self._decode(self._window)
        self._num_context = len(self._window)
        return new_text
