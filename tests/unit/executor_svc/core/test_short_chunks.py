"""What is left of prompts that are there already, divided into single tokens: nothing is lost, and groups are right."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from common.ids import SeqId
from executor_svc.core.batch import BatchSequence, ScheduledChunk
from executor_svc.core.prefix_groups import MAX_GROUPS, MIN_SAVED_TOKENS, NO_GROUPS
from executor_svc.core.short_chunks import MAX_TOKENS, MIN_CONTEXT_TOKENS, divide

Chunk = ScheduledChunk[None]


def chunk(number: int, start: int, num_tokens: int, *, samples: bool = True) -> Chunk:
    stop = start + num_tokens
    return ScheduledChunk(BatchSequence(SeqId(number), number, None, stop, stop, start, 0), start, stop, samples)


def places(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return [(c.sequence.row, position) for c in chunks for position in range(c.start, c.stop)]


def test_the_rest_of_a_prompt_that_is_there_is_a_group_of_decodes() -> None:
    rest, decode, new = chunk(0, 15_984, 16), chunk(1, 700, 1), chunk(2, 0, 500, samples=False)

    divided = divide([rest, new, decode], 64)

    assert [c.stop - c.start for c in divided.chunks] == [1] * 17 + [500]
    assert divided.chunks[0] is decode and divided.chunks[-1] is new and divided.num_decodes == 1
    assert [c.start for c in divided.chunks[1:17]] == list(range(15_984, 16_000))
    assert [c.samples for c in divided.chunks] == [True, *[False] * 15, True, False]
    groups = divided.groups(None)
    assert groups is not None
    assert (groups.lens.tolist(), groups.ends.tolist()) == ([15_872], [16])
    assert groups.members.tolist() == list(range(1, 17))


def test_what_saves_little_is_divided_without_a_group() -> None:
    divided = divide([chunk(0, MIN_CONTEXT_TOKENS, 3)], 64)

    assert len(divided.chunks) == 3
    assert divided.groups(None) is None


def test_long_chunks_short_contexts_and_what_is_too_much_stay_whole() -> None:
    whole = [chunk(0, 9000, MAX_TOKENS + 1), chunk(1, MIN_CONTEXT_TOKENS - 1, 8), chunk(2, 9000, 30)]

    divided = divide([*whole, chunk(3, 50, 1)], 30)

    assert divided.chunks[1:] == whole and not divided.spans
    assert divided.groups(NO_GROUPS) is NO_GROUPS


@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 20_000), st.one_of(st.just(1), st.integers(2, 40)), st.booleans()), min_size=1, max_size=40
    ),
    max_decodes=st.integers(1, 400),
)
def test_every_token_is_computed_once_and_groups_share_what_they_say(
    shapes: list[tuple[int, int, bool]], max_decodes: int
) -> None:
    chunks = [chunk(number, *shape[:2], samples=shape[2]) for number, shape in enumerate(shapes)]

    divided = divide(chunks, max_decodes)

    assert sorted(places(list(divided.chunks))) == sorted(places(chunks))
    assert {c.sequence.row for c in divided.chunks if c.samples} == {c.sequence.row for c in chunks if c.samples}
    assert sum(c.samples for c in divided.chunks) == sum(c.samples for c in chunks)
    singles = list(itertools.takewhile(lambda c: c.stop - c.start == 1, divided.chunks))
    num_decodes = sum(c.stop - c.start == 1 for c in chunks)
    assert divided.num_decodes == num_decodes and len(singles) <= max(max_decodes, num_decodes)
    assert all(c.stop - c.start > 1 for c in divided.chunks[len(singles) :])
    groups = divided.groups(None)
    if groups is None:
        assert sum(span.saved for span in divided.spans) < MIN_SAVED_TOKENS
        return
    assert len(groups.lens) == len(groups.ends) <= MAX_GROUPS and len(groups.members) == groups.ends[-1]
    assert len(set(groups.members.tolist())) == len(groups.members)
    for length, begin, end in zip(groups.lens.tolist(), [0, *groups.ends.tolist()], groups.ends.tolist(), strict=False):
        members = [singles[place] for place in groups.members[begin:end].tolist()]
        assert len({c.sequence.row for c in members}) == 1
        assert 0 < length <= min(c.start for c in members)
