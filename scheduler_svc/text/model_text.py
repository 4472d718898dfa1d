"""Everything about text of one model: tokenizer, chat template, detokenizers, defaults. Knows the model's folder, no weights.

Long texts are tokenised in a thread, so that running streams do not stall.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from common.model_spec import ModelSpec, read_model_spec
from scheduler_svc.text.chat_template import ChatTemplate
from scheduler_svc.text.detokenizer import DetokenizerFactory
from scheduler_svc.text.tokenizer import Tokenizer

_INLINE_CHARACTERS = 2048


@dataclass(frozen=True)
class ModelText:
    """A model's text side. Without a folder there is none, and clients send token ids.

    Attributes:
        spec: of the folder; None: no folder.
        tokenizer, detokenizers: None: the folder has no tokenizer.
        chat_template: None: the model has none.
    """

    spec: ModelSpec | None = None
    tokenizer: Tokenizer | None = None
    detokenizers: DetokenizerFactory | None = None
    chat_template: ChatTemplate | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="tokenizer"))

    @classmethod
    def load(cls, folder: Path | None, name: str | None = None) -> "ModelText":
        """Reads a model folder; None: a model without text.

        Raises:
            StartupError: a file of it cannot be read.
        """
        if folder is None:
            return cls()
        spec = read_model_spec(folder, name)
        tokenizer = Tokenizer.load(folder)
        if tokenizer is None:
            return cls(spec)
        return cls(spec, tokenizer, DetokenizerFactory(tokenizer), ChatTemplate.load(spec))

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; the model has a tokenizer."""
        assert self.tokenizer is not None
        if len(text) <= _INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        tokenizer = self.tokenizer
        return await loop.run_in_executor(self._thread, lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """The text of a conversation; the model has a chat template.

        Raises:
            InvalidParameter: the template refuses the conversation.
        """
        template = self.chat_template
        assert template is not None
        if sum(len(message["content"]) for message in messages) <= _INLINE_CHARACTERS:
            return template.render(messages, add_generation_prompt=add_generation_prompt)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, lambda: template.render(messages, add_generation_prompt=add_generation_prompt)
        )

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
