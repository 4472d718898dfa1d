"""What goes over the line comes out as it was."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import DuplicateRequest, InvalidParameter, OctavoError, QueueFull, SlowConsumer
from common.ids import BlockKey, RequestId
from octavo.scheduler.v1 import edge_line_pb2 as pb
from scheduler_svc.core.request import Request, SamplingParams, StopConditions
from scheduler_svc.edge_line import convert

TOKEN_IDS = st.integers(0, 2**32 - 1)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
KEYS = st.binary(min_size=32, max_size=32).map(BlockKey)
REQUESTS: Any = st.builds(
    Request,
    request_id=st.text(max_size=20).map(RequestId),
    prompt_token_ids=st.lists(TOKEN_IDS, min_size=1, max_size=50).map(tuple),
    sampling=st.builds(
        SamplingParams,
        temperature=FLOATS, top_p=FLOATS, top_k=TOKEN_IDS, min_p=FLOATS, presence_penalty=FLOATS, frequency_penalty=FLOATS,
        repetition_penalty=FLOATS, seed=st.integers(0, 2**64 - 1), logit_bias=st.dictionaries(TOKEN_IDS, FLOATS, max_size=5),
        num_logprobs=st.none() | st.integers(0, 20),
    ),
    stop=st.builds(StopConditions, st.integers(1, 1000), st.integers(0, 1000), st.frozensets(TOKEN_IDS, max_size=5)),
    root_key=KEYS,
    arrival_s=st.floats(0, 1e9),
    n=st.integers(1, 64),
    queue_deadline_s=st.none() | st.floats(0, 1e9),
    generated=st.just(()),
    prompt_keys=st.none() | st.lists(KEYS, max_size=5).map(tuple),
)  # fmt: skip


@settings(max_examples=50)
@given(request=REQUESTS, first_sample=st.integers(0, 2**64 - 1))
def test_a_request_arrives_as_it_was_sent(request: Request, first_sample: int) -> None:
    message = pb.SubmitRequest.FromString(convert.submit_message(first_sample, request).SerializeToString())

    assert message.first_sample == first_sample
    assert convert.submitted_request(message) == request


@pytest.mark.parametrize(
    "error",
    [
        QueueFull("full", retry_after_s=1.5),
        DuplicateRequest("in use", metadata={"requestId": "x"}),
        InvalidParameter("n", "is 0, at least 1"),
        SlowConsumer("behind"),
        OctavoError("internal error"),
    ],
)
def test_an_error_arrives_as_it_was_raised(error: OctavoError) -> None:
    found = convert.error_of(convert.error_bytes(error))

    assert type(found) is type(error)
    assert (found.message, found.metadata, found.retry_after_s) == (error.message, error.metadata, error.retry_after_s)
