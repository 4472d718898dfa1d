import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.text.detokenizer import DetokenizerFactory
from scheduler_svc.text.tokenizer import Tokenizer
from tests.unit.scheduler_svc.text.small_tokenizers import byte_fallback, byte_level

BYTE_LEVEL = Tokenizer(byte_level())
BYTE_FALLBACK = Tokenizer(byte_fallback())
BYTE_FALLBACK_VOCAB = byte_fallback().get_vocab()
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
IDS = st.lists(st.integers(0, 275), max_size=60)


def pieces(tokenizer: Tokenizer, token_ids: list[int], prompt: tuple[int, ...] = (), *, skip: bool = True) -> list[str]:
    detokenizer = DetokenizerFactory(tokenizer).new(prompt, skip_special_tokens=skip)
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@TOKENIZERS
@pytest.mark.parametrize("skip", [True, False])
@given(token_ids=IDS)
def test_pieces_put_together_are_the_whole_text(tokenizer: Tokenizer, skip: bool, token_ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, token_ids, skip=skip)) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(text=st.text(max_size=40))
def test_text_that_was_encoded_comes_back_on_whole_characters(text: str) -> None:
    found = pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text))
    assert "".join(found) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in found)


def test_bytes_of_a_character_wait_for_the_last_one() -> None:
    ids = BYTE_LEVEL.encode("日")
    assert pieces(BYTE_LEVEL, ids) == ["", "", "日", ""]
    assert pieces(BYTE_LEVEL, ids[:2]) == ["", "", "\ufffd"]


def test_byte_fallback_tokens_wait_for_the_end_of_their_run() -> None:
    ids = [*(BYTE_FALLBACK_VOCAB[f"<0x{byte:02X}>"] for byte in "日".encode()), BYTE_FALLBACK_VOCAB["▁a"]]
    assert pieces(BYTE_FALLBACK, ids) == ["", "", "", "日 a", ""]


def test_the_space_of_the_first_token_is_kept_after_a_prompt() -> None:
    the = BYTE_FALLBACK_VOCAB["▁the"]
    assert "".join(pieces(BYTE_FALLBACK, [the, the])) == "the the"
    assert "".join(pieces(BYTE_FALLBACK, [the, the], prompt=(the,))) == " the the"


def test_unknown_ids_stand_for_nothing() -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        assert "".join(pieces(tokenizer, [100_000])) == ""
