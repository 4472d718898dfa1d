from scheduler_svc.text.detokenizer import DetokenizerFactory
from scheduler_svc.text.sample_text import SampleText
from scheduler_svc.text.stop_strings import StopMatcher, StopPatterns
from scheduler_svc.text.tokenizer import Tokenizer
from tests.unit.scheduler_svc.text.small_tokenizers import EOS_ID, byte_level

TOKENIZER = Tokenizer(byte_level())


def sample(*stop: str, min_tokens: int = 0) -> SampleText:
    detokenizer = DetokenizerFactory(TOKENIZER).new(skip_special_tokens=True)
    return SampleText(detokenizer, StopMatcher(StopPatterns(stop)), min_tokens=min_tokens)


def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    text = sample("END")
    out = "".join(text.push(token_id) for token_id in TOKENIZER.encode("one EN") + TOKENIZER.encode("D"))
    assert (out, text.matched_stop) == ("one ", "END")


def test_the_end_gives_out_what_was_held() -> None:
    text = sample("END")
    assert [text.push(token_id) for token_id in TOKENIZER.encode("EN")] == ["", ""]
    assert (text.finish([EOS_ID]), text.matched_stop, text.num_tokens) == ("EN", None, 3)


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    text = sample("a", min_tokens=3)
    out = [text.push(token_id) for token_id in TOKENIZER.encode("aaa")]
    assert (out, text.matched_stop) == (["a", "a", ""], "a")


def test_without_a_tokenizer_tokens_are_counted_only() -> None:
    text = SampleText(None, StopMatcher(StopPatterns(())))
    assert (text.push(5), text.finish([6]), text.num_tokens) == ("", "", 2)
