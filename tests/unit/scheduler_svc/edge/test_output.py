import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Cancelled, SlowConsumer
from common.ids import RequestId, SeqId
from octavo.types.v1.types_pb2 import PositionLogprobs, TokenLogprob
from scheduler_svc.core.plan import SampleId, SequenceUpdate
from scheduler_svc.core.request import FinishReason
from scheduler_svc.edge.output import MAX_PENDING_TOKENS, RequestOutput, SampleDelta
from scheduler_svc.text.detokenizer import DetokenizerFactory
from scheduler_svc.text.sample_text import SampleText
from scheduler_svc.text.stop_strings import StopMatcher, StopPatterns
from scheduler_svc.text.tokenizer import Tokenizer
from tests.unit.scheduler_svc.text.small_tokenizers import EOS_ID, byte_level

TOKENIZER = Tokenizer(byte_level())


def output(n: int = 1, *stop: str, is_bounded: bool = True, echo: str = "", keep_stop: bool = False) -> RequestOutput:
    factory, patterns = DetokenizerFactory(TOKENIZER), StopPatterns(stop)
    samples = [SampleText(factory.new(skip_special_tokens=True), StopMatcher(patterns)) for _ in range(n)]
    return RequestOutput(samples, echo=echo, is_bounded=is_bounded, keep_stop=keep_stop)


def update(
    token_ids: Sequence[int], index: int = 0, finish: FinishReason | None = None, stop_token_id: int | None = None
) -> SequenceUpdate:
    return SequenceUpdate(RequestId("r"), SeqId(index), index, tuple(token_ids), finish, stop_token_id)


def text(deltas: list[SampleDelta], index: int = 0) -> str:
    return "".join(piece for delta in deltas if delta.index == index for piece in delta.text)


async def test_news_are_merged_while_nobody_reads() -> None:
    out = output()
    ids = TOKENIZER.encode("hello world")
    logprobs = [PositionLogprobs(chosen=TokenLogprob(token_id=token_id)) for token_id in ids]
    for token_id, logprob in zip(ids, logprobs, strict=True):
        out.push(update([token_id]), [logprob])
    deltas = await out.read()
    assert len(deltas) == 1
    assert (text(deltas), deltas[0].token_ids, deltas[0].logprobs) == ("hello world", ids, logprobs)
    out.push(update([], finish=FinishReason.LENGTH), [])
    assert not out.is_read
    assert (await out.read())[0].finish_reason is FinishReason.LENGTH
    assert out.is_over and out.is_read


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("early", [False, True])
async def test_the_end_of_a_request_gathers_nothing(fails: bool, early: bool) -> None:
    out = output()
    if early:  # there before the reader asked
        out.push(update(TOKENIZER.encode("a")), [])
    reading = asyncio.create_task(out.read(gather_s=3600))
    await asyncio.sleep(0)
    if not early:
        out.push(update(TOKENIZER.encode("a")), [])
        await asyncio.sleep(0)
    assert not reading.done()
    if fails:
        out.fail(Cancelled("enough"))
    else:
        out.push(update([], finish=FinishReason.LENGTH), [])
    assert text(await reading) == "a"
    assert out.is_over
    if not fails:
        assert await out.read(gather_s=3600) == []


async def test_what_has_gathered_goes_out_by_itself_when_nothing_more_comes() -> None:
    out = output()
    reading = asyncio.create_task(out.read(gather_s=0.001))
    await asyncio.sleep(0)
    for piece in "ab":
        out.push(update(TOKENIZER.encode(piece)), [])
    assert text(await reading) == "ab"


@given(reads=st.lists(st.booleans(), min_size=30, max_size=30), content=st.text(min_size=1, max_size=10))
async def test_nothing_is_lost_whenever_the_reader_comes(reads: list[bool], content: str) -> None:
    out = output(2)
    deltas: list[SampleDelta] = []
    ids = TOKENIZER.encode(content)
    for token_id, is_read_now in zip(ids, reads, strict=False):
        for index in range(2):
            out.push(update([token_id], index), [])
        if is_read_now:
            deltas += await out.read()
    for token_id in ids[len(reads) :]:
        for index in range(2):
            out.push(update([token_id], index), [])
    for index in range(2):
        out.push(update([EOS_ID], index, FinishReason.STOP, EOS_ID), [])
    deltas += await out.read()
    assert out.is_read
    for index in range(2):
        assert text(deltas, index) == content
        assert [i for d in deltas if d.index == index for i in d.token_ids] == [*ids, EOS_ID]
    assert out.num_tokens == 2 * (len(ids) + 1)


async def test_a_reader_that_is_too_far_behind_loses_its_request_but_no_token() -> None:
    out = output()
    for _ in range(MAX_PENDING_TOKENS + 1):
        out.push(update([5]), [])
    assert isinstance(out.error, SlowConsumer)
    deltas = await out.read()
    assert len(deltas[0].token_ids) == MAX_PENDING_TOKENS + 1
    with pytest.raises(SlowConsumer):
        await out.read()


async def test_a_reader_of_the_whole_waits_for_the_end_and_has_no_bound() -> None:
    out = output(is_bounded=False)
    for _ in range(MAX_PENDING_TOKENS + 1):
        out.push(update([5]), [])
    assert out.error is None
    out.push(update([5], finish=FinishReason.LENGTH), [])
    assert len((await out.read())[0].token_ids) == MAX_PENDING_TOKENS + 2


async def test_a_stop_string_ends_a_sample_and_later_tokens_are_no_news() -> None:
    out = output(2, "END")
    ids = TOKENIZER.encode("xENDy")
    out.push(update(ids), [])
    out.push(update(ids), [])
    out.push(update(ids, 0, FinishReason.LENGTH), [])
    assert out.has_ended(0) and not out.has_ended(1) and not out.is_over
    deltas = await out.read()
    assert (text(deltas), deltas[0].stop_str, deltas[0].finish_reason) == ("x", "END", FinishReason.STOP)
    assert deltas[0].token_ids == ids[:4] and out.num_tokens == 4


async def test_a_stop_string_beats_the_length_that_comes_with_the_same_token() -> None:
    out = output(1, "END")
    out.push(update(TOKENIZER.encode("END"), finish=FinishReason.LENGTH), [])
    assert (await out.read())[0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("keep_stop", "expected"), [(False, "a"), (True, "ab")])
async def test_the_text_of_a_stop_token_goes_out_only_when_asked_for(keep_stop: bool, expected: str) -> None:
    out = output(keep_stop=keep_stop)
    ids = TOKENIZER.encode("ab")
    out.push(update(ids, finish=FinishReason.STOP, stop_token_id=ids[1]), [])
    deltas = await out.read()
    assert (text(deltas), deltas[0].stop_token_id) == (expected, ids[1])


async def test_echo_comes_first_for_each_sample() -> None:
    out = output(2, echo="prompt ")
    for index in range(2):
        out.push(update(TOKENIZER.encode("x"), index), [])
    deltas = await out.read()
    assert [text(deltas, 0), text(deltas, 1)] == ["prompt x", "prompt x"]


async def test_a_failure_comes_after_what_was_there() -> None:
    out = output()
    out.push(update(TOKENIZER.encode("x")), [])
    out.fail(Cancelled("cancelled"))
    out.push(update(TOKENIZER.encode("y")), [])
    assert text(await out.read()) == "x"
    with pytest.raises(Cancelled):
        await out.read()


@given(st.text("abcdé\n", max_size=40), st.lists(st.text("abcd", min_size=1, max_size=3), max_size=2), st.booleans())
def test_a_token_by_the_short_way_does_what_an_update_does(written: str, stop: list[str], is_bounded: bool) -> None:
    long, short = (output(2, *stop, is_bounded=is_bounded) for _ in range(2))
    for token_id in TOKENIZER.encode(written):
        long.push(update([token_id], 1), [])
        assert short.push_token(SampleId(RequestId("r"), SeqId(1), 1), token_id) == long.has_ended(1)
    assert (short.num_tokens, short.is_over, short._pending) == (long.num_tokens, long.is_over, long._pending)


def test_a_reader_that_is_too_slow_for_single_tokens_loses_its_request() -> None:
    out = output()
    told = [out.push_token(SampleId(RequestId("r"), SeqId(0), 0), 5) for _ in range(MAX_PENDING_TOKENS + 1)]
    assert told == [False] * MAX_PENDING_TOKENS + [True]
    assert isinstance(out.error, SlowConsumer)
