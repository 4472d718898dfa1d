from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.text.stop_strings import StopMatch, StopMatcher, StopPatterns

ALPHABET = st.text("ab", max_size=20)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def run(texts: list[str], stop: list[str], *, keep: bool = False) -> tuple[list[str], str | None]:
    """The pieces that went out, and the match."""
    matcher = StopMatcher(StopPatterns(stop, keep=keep))
    out: list[str] = []
    for text in texts:
        found = matcher.push(text)
        if isinstance(found, StopMatch):
            return [*out, found.text], found.stop_str
        out.append(found)
    return [*out, matcher.flush()], None


def naive(text: str, stop: list[str], *, keep: bool) -> tuple[str, str | None]:
    """Looks at every prefix of the text from the shortest on."""
    for end in range(len(text) + 1):
        endings = [s for s in stop if text[:end].endswith(s)]
        if endings:
            longest = max(endings, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None


@given(texts=st.lists(ALPHABET, max_size=8), stop=STOPS, keep=st.booleans())
def test_any_cut_of_the_text_gives_the_naive_answer(texts: list[str], stop: list[str], keep: bool) -> None:
    out, matched = run(texts, stop, keep=keep)
    assert ("".join(out), matched) == naive("".join(texts), stop, keep=keep)


@given(texts=st.lists(ALPHABET, max_size=8), stop=STOPS)
def test_nothing_goes_out_that_a_match_takes_back_and_nothing_is_held_without_need(texts: list[str], stop: list[str]) -> None:
    matcher = StopMatcher(StopPatterns(stop))
    seen = out = ""
    for text in texts:
        found = matcher.push(text)
        if isinstance(found, StopMatch):
            return
        seen, out = seen + text, out + found
        held = seen[len(out) :]
        longest = max((n for s in stop for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert len(held) == longest


def test_a_match_across_borders_keeps_what_is_before_it() -> None:
    assert run(["one S", "TO", "P two"], ["STOP"]) == (["one ", "", ""], "STOP")
    assert run(["one S", "TO", "P two"], ["STOP"], keep=True) == (["one ", "", "STOP"], "STOP")


def test_a_beginning_that_comes_to_nothing_goes_out_later() -> None:
    assert run(["S", "T", "RAY"], ["STOP"]) == (["", "", "STRAY", ""], None)
    assert run(["x STO"], ["STOP"]) == (["x ", "STO"], None)


def test_without_stop_strings_text_passes_through() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], None)
