"""A GGUF file as an ordinary Hugging Face folder. Knows the file format's readers, no caches and no names.

transformers reads the weights and most of the tokenizer; what it gets wrong is put right here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from tokenizers import pre_tokenizers

from common.errors import StartupError

_MAGIC = b"GGUF"
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Values of tokenizer.ggml.pre whose tokenizers split every digit from its neighbours before anything else."""


def convert_gguf(file: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Writes config, float32 weights, tokenizer, chat template and generation config.

    Args:
        file: the GGUF.
        folder: exists and is empty.
        progress: called with lines for people.

    Raises:
        StartupError: the file is no GGUF, truncated, or of an architecture that transformers cannot read.
    """
    progress(f"reading {file.name} ({file.stat().st_size / 1e6:.0f} MB)")
    reader = _open(file)
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        progress("converting the tokenizer (seconds, a minute on a slow machine)")
        _convert_tokenizer(file, _text(reader, "tokenizer.ggml.pre")).save_pretrained(folder)
        progress(f"converting {len(reader.tensors)} weight tensors to float32 (seconds, a minute on a slow machine)")
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        # What is left of the way in would make transformers look for a quantiser on the way out.
        model.hf_quantizer = None
        for owner in (model.config, model.config.get_text_config()):
            if hasattr(owner, "quantization_config"):
                del owner.quantization_config
        progress("writing the folder")
        model.save_pretrained(folder)
    except StartupError:
        raise
    except OSError:
        raise
    except Exception as error:
        raise StartupError(f"{file} cannot be converted: {error}") from error
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()


def _open(file: Path) -> GGUFReader:
    """Reads the file's header and checks that every tensor lies within the file."""
    with file.open("rb") as stream:
        if stream.read(4) != _MAGIC:
            raise StartupError(f"{file} is not a GGUF file: it does not start with {_MAGIC.decode()}")
    size = file.stat().st_size
    try:
        reader = GGUFReader(file)
    except Exception as error:  # the reader walks over a memory map and fails in many ways
        raise StartupError(
            f"{file} is truncated or damaged: its {size} bytes do not hold what its header says ({error})"
        ) from error
    end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors), default=0)
    if not reader.tensors:
        raise StartupError(f"{file} holds no weights")
    if end > size:
        raise StartupError(f"{file} is truncated: {size} bytes of {end}")
    return reader


def _text(reader: GGUFReader, key: str) -> str:
    """A text field of the header; empty if there is none."""
    field = reader.get_field(key)
    return "" if field is None else str(field.contents())


def _convert_tokenizer(file: Path, pre_tokenizer: str) -> Any:
    """The file's tokenizer.

    Args:
        file: the GGUF.
        pre_tokenizer: its tokenizer.ggml.pre.
    """
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if pre_tokenizer in _SINGLE_DIGITS:
        # transformers keeps only the byte-level step, so that "1984" would become other tokens than in training.
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    return tokenizer
