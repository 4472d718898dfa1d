"""What scheduler and command line need to know of a prepared model folder. Reads JSON files, no torch, no weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import StartupError

_FALLBACK_CONTEXT = 2048
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model.

    Attributes:
        name: public name, "models/{short name}".
        folder: the prepared folder.
        family: transformers' model type, for example "llama".
        max_model_len: longest sequence, prompt and output together, unless the executor is told otherwise.
        vocab_size: token ids are below it.
        eos_token_ids: end of text.
        has_tokenizer: whether text can be turned into tokens.
        chat_template: Jinja source that turns messages into a prompt; None if there is none.
        generation_defaults: temperature, top_p, top_k, repetition_penalty and so on, as far as the model recommends any.
    """

    name: str
    folder: Path
    family: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    has_tokenizer: bool
    chat_template: str | None
    generation_defaults: dict[str, float]

    @property
    def tokenizer_file(self) -> Path:
        """tokenizer.json of the folder; exists if has_tokenizer."""
        return self.folder / "tokenizer.json"

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be turned into a prompt."""
        return self.chat_template is not None


def read_model_spec(folder: Path, name: str | None = None) -> ModelSpec:
    """Reads a prepared folder.

    Args:
        folder: has config.json; tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja if any.
        name: public name with or without "models/"; None: from the folder's name.

    Raises:
        StartupError: config.json is missing or damaged, or says no vocabulary size.
    """
    config = _read_json(folder / "config.json", required=True)
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    generation = _read_json(folder / "generation_config.json")
    tokenizer = _read_json(folder / "tokenizer_config.json")
    vocab_size = text.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise StartupError(f"{folder / 'config.json'} says no vocab_size")
    eos = generation.get("eos_token_id", text.get("eos_token_id", config.get("eos_token_id")))
    return ModelSpec(
        name=public_name(name if name is not None else folder_name(folder)),
        folder=folder,
        family=str(text.get("model_type", config.get("model_type", "unknown"))),
        max_model_len=_max_model_len(text),
        vocab_size=vocab_size,
        eos_token_ids=frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
        has_tokenizer=(folder / "tokenizer.json").is_file(),
        chat_template=_chat_template(folder, tokenizer),
        generation_defaults=_generation_defaults(generation),
    )


def folder_name(folder: Path) -> str:
    """A model's short name by its folder; of a snapshot in the hub cache, by the repository instead of the commit."""
    folder = folder.resolve()
    return folder.parent.parent.name.removeprefix("models--") if folder.parent.name == "snapshots" else folder.name


def public_name(name: str) -> str:
    """The resource name "models/{short name}" of a short name, or of one that is complete already."""
    short = name.removeprefix("models/").strip("/").lower().replace("/", "--")
    return f"models/{short or 'model'}"


def _max_model_len(text: dict[str, Any]) -> int:
    """As executor_svc loads it by default: with "longrope", the length of the first set of frequencies."""
    longest = next((int(text[key]) for key in _CONTEXT_KEYS if text.get(key)), _FALLBACK_CONTEXT)
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key) or {}
        for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
            kind = part.get("rope_type", part.get("type"))
            original = part.get("original_max_position_embeddings", text.get("original_max_position_embeddings"))
            if kind == "longrope" and original:
                longest = min(longest, int(original))
    return longest


def _chat_template(folder: Path, tokenizer: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _generation_defaults(generation: dict[str, Any]) -> dict[str, float]:
    """Sampling defaults; a model that says do_sample false means greedy."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    defaults = {name: float(generation[name]) for name in names if isinstance(generation.get(name), int | float)}
    if generation.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def _read_json(file: Path, *, required: bool = False) -> dict[str, Any]:
    if not file.is_file():
        if required:
            raise StartupError(f"model folder {file.parent} has no {file.name}")
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartupError(f"{file} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{file} is damaged: not an object")
    return value
