"""Substitutes for tokens: equal where the tokens are, and nothing else can be told from them."""

import random

from hypothesis import given
from hypothesis import strategies as st

from common.block_hash import chain_keys, root_key
from common.ids import BlockKey
from scheduler_svc.recording.outlines import DrawnTokens, Outliner

ROOT = root_key(bytes(32))
tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def substitutes(outliner: Outliner, token_ids: list[int], num_prompt: int) -> list[int]:
    """Of a sequence that came with a prompt and drew the rest."""
    prompt = token_ids[:num_prompt]
    keys = chain_keys(ROOT, prompt, outliner.block_size)
    drawn = DrawnTokens(outliner, ROOT, prompt, keys)
    rest = [drawn.take(token_id, is_stop=False) for token_id in token_ids[num_prompt:]]
    return [*outliner.outline(ROOT, prompt, keys).token_ids(outliner.block_size), *rest]


@given(token_ids=tokens, block_size=st.integers(1, 5), data=st.data())
def test_prompt_and_drawn_tokens_have_the_same_substitutes(token_ids: list[int], block_size: int, data: st.DataObject) -> None:
    outliner = Outliner(b"s" * 32, block_size, is_keyed=True)
    num_prompt = data.draw(st.integers(1, len(token_ids)))

    assert substitutes(outliner, token_ids, num_prompt) == substitutes(outliner, token_ids, len(token_ids))


@given(one=tokens, other=tokens, block_size=st.integers(1, 5))
def test_chains_of_substitutes_are_equal_exactly_where_those_of_tokens_are(
    one: list[int], other: list[int], block_size: int
) -> None:
    outliner = Outliner(b"s" * 32, block_size, is_keyed=True)
    real, stood_for = ([chain_keys(ROOT, ids, block_size) for ids in (one, other)], [])
    for ids in (one, other):
        stood_for.append(chain_keys(ROOT, substitutes(outliner, ids, len(ids)), block_size))

    assert _num_shared(real[0], real[1]) == _num_shared(stood_for[0], stood_for[1])


def test_nothing_of_the_tokens_is_left() -> None:
    rng = random.Random(3)
    token_ids = [rng.randrange(10, 30_000) for _ in range(1000)]
    one = substitutes(Outliner(b"1" * 32, 16, is_keyed=True), token_ids, 900)
    other = substitutes(Outliner(b"2" * 32, 16, is_keyed=True), token_ids, 900)

    assert not set(one) & set(token_ids)
    assert {a for a, b in zip(one, other, strict=True) if a == b} == {0}, "two secrets have a digest in common"


def _num_shared(one: list[BlockKey], other: list[BlockKey]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
