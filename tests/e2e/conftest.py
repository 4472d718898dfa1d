"""The default model, its reference answers by transformers, and prompts; computed once per session."""

import random
from pathlib import Path

import pytest

from tests.e2e.reference import Reference

NUM_PROMPTS = 64
MAX_TOKENS = 12
LONG_TOKENS = 40
"""Of the prompts up to LONG_PROMPT tokens: more than two blocks, so that running requests outgrow a small pool."""
LONG_PROMPT = 129
_TEXT = (
    "the of a river model paper green 7 12 345 stone quickly under window memory blue letter engine because music 1999 winter "
    "train small coffee reads every cat garden about light number and but, market. city? answer: table open"
)


def prompt_lengths() -> list[int]:
    """64 lengths from 1 to 900: around block and chunk borders first, then spread out."""
    borders = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 900]
    spread = [round(20 + 600 * (i / 36) ** 2) for i in range(NUM_PROMPTS - len(borders))]
    return borders + spread


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model as a prepared folder."""
    from executor_svc.model.prepare import prepare_model
    from executor_svc.settings import default_cache_dir

    return prepare_model("smollm2-135m-instruct", default_cache_dir(), print)


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> Reference:
    """Transformers on the same weights in fp32."""
    return Reference(model_folder)


@pytest.fixture(scope="session")
def prompts(model_folder: Path) -> list[list[int]]:
    """64 prompts of natural words, of prompt_lengths() tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    rng = random.Random(17)
    words = _TEXT.split()
    prompts: list[list[int]] = []
    for length in prompt_lengths():
        text = " ".join(rng.choice(words) for _ in range(length + 8))
        prompts.append(tokenizer.encode(text).ids[:length])
    return prompts


@pytest.fixture(scope="session")
def expected_long(reference: Reference, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of transformers' generate, one by one: LONG_TOKENS of short prompts, MAX_TOKENS of the others."""
    return [reference.generate(p, LONG_TOKENS if len(p) <= LONG_PROMPT else MAX_TOKENS) for p in prompts]


@pytest.fixture(scope="session")
def expected(expected_long: list[list[int]]) -> list[list[int]]:
    """The first MAX_TOKENS of them."""
    return [tokens[:MAX_TOKENS] for tokens in expected_long]
