"""A conversation to the text that the model was trained on, by the template of its folder. Knows Jinja; runs it in a sandbox.

The environment is the one that templates are written for: blocks trimmed, loop controls, tojson, raise_exception, strftime_now,
the names of special tokens, and {% generation %} that marks the assistant's words in training.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidParameter, StartupError
from common.model_spec import ModelSpec

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %} renders what is inside."""

    tags = {"generation"}  # noqa: RUF012  (the library declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: dict[str, str]):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise StartupError(f"the model's chat template does not compile: {error}") from error

    @classmethod
    def load(cls, spec: ModelSpec) -> "ChatTemplate | None":
        """The template of a model folder.

        Returns:
            None: the model has none.

        Raises:
            StartupError: it has one that cannot be used.
        """
        if spec.chat_template is None:
            return None
        path = spec.folder / "tokenizer_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise StartupError(f"cannot read {path}: {error}") from error
        special_tokens = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
        return cls(spec.chat_template, special_tokens)

    def render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """The conversation as one text, special tokens spelled out.

        Args:
            messages: each with "role" and "content".
            add_generation_prompt: end with the beginning of the assistant's next turn.

        Raises:
            InvalidParameter: the template refuses this conversation, and says why.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, tools=None, documents=None,
                **self._special_tokens,
            )  # fmt: skip
        except (jinja2.TemplateError, TypeError, OverflowError) as error:
            raise InvalidParameter("chat.messages", f"refused by the model's chat template: {error}") from error


def _token_text(token: str | dict[str, str]) -> str:
    return token if isinstance(token, str) else token["content"]


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own tojson escapes characters of HTML; templates expect plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
