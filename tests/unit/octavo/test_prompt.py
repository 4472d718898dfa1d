"""Prompts and options as request messages."""

import typing
from typing import Any, cast

import pytest

from octavo.errors import InvalidParameter
from octavo.prompt import ChatMessage, GenerateOptions, Prompt, generate_request, set_prompt
from octavo.scheduler.v1 import inference_service_pb2 as pb

EVERY_OPTION = GenerateOptions(
    model="models/m",
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.5,
    seed=2**64 - 1,
    logit_bias={7: -1.5},
    max_tokens=9,
    min_tokens=2,
    stop=["a", "b"],
    stop_token_ids=[3, 4],
    ignore_eos=True,
    include_stop_str_in_output=True,
    logprobs=5,
    return_token_ids=True,
    skip_special_tokens=False,
    echo=True,
    n=4,
    request_id="r",
    cache_salt="s",
    queue_timeout_s=1.5,
    timeout_s=10.0,
    service_class="batch",
    priority=-3,
    ttft_target_s=0.5,
    tpot_target_s=0.02,
    deadline_s=30.0,
)


def test_every_option_arrives() -> None:
    assert set(EVERY_OPTION) == set(typing.get_type_hints(GenerateOptions))

    request = generate_request("hello", EVERY_OPTION)

    assert (request.text, request.model, request.n, request.request_id, request.cache_salt) == ("hello", "models/m", 4, "r", "s")
    sampling, stopping, output = request.sampling, request.stopping, request.output
    assert (sampling.temperature, sampling.top_k, sampling.seed, dict(sampling.logit_bias)) == (0.5, 40, 2**64 - 1, {7: -1.5})
    assert sampling.top_p == pytest.approx(0.9)
    assert sampling.min_p == pytest.approx(0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, 0.25, 1.5)
    assert (stopping.max_tokens, stopping.min_tokens, list(stopping.stop), list(stopping.stop_token_ids)) == (
        9,
        2,
        ["a", "b"],
        [3, 4],
    )
    assert stopping.ignore_eos
    assert stopping.include_stop_str_in_output
    assert (output.logprobs, output.return_token_ids, output.skip_special_tokens, output.echo) == (5, True, False, True)
    assert request.queue_timeout.ToNanoseconds() == 1_500_000_000
    qos = request.qos
    assert (qos.service_class, qos.priority) == (pb.SERVICE_CLASS_BATCH, -3)
    targets = (qos.ttft_target, qos.tpot_target, qos.deadline)
    assert [target.ToNanoseconds() for target in targets] == [500_000_000, 20_000_000, 30_000_000_000]


def test_a_class_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(InvalidParameter, match="'urgent' is no class, must be one of interactive, standard, batch"):
        generate_request("hello", {"service_class": "urgent"})


def test_what_is_not_given_is_not_set() -> None:
    request = generate_request("hello", {})

    assert [field.name for field, _ in request.ListFields()] == ["text"]


def test_zero_is_given() -> None:
    request = generate_request("hello", {"temperature": 0.0, "seed": 0, "logprobs": 0})

    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")
    assert request.output.HasField("logprobs")


def test_one_stop_string_needs_no_list() -> None:
    assert list(generate_request("hello", {"stop": "END"}).stopping.stop) == ["END"]


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [("", "text"), ("text", "text"), ([1, 2], "token_ids"), ((0,), "token_ids"), ([ChatMessage("user", "hi")], "chat")],
)
def test_a_prompt_is_known_by_its_type(prompt: Prompt, kind: str) -> None:
    assert generate_request(prompt, {}).WhichOneof("prompt") == kind


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([], "prompt"),
        ([-1], "prompt"),
        ([2**32], "prompt"),
        (["words"], "prompt"),
        ([ChatMessage("user", "hi"), 3], "prompt"),
        ("\ud800", "text"),
        ([ChatMessage("user", "\ud800")], "content"),
    ],
)
def test_a_prompt_that_no_message_holds_is_refused(prompt: Any, field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        generate_request(prompt, {})

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -1),
        ("seed", 2**64),
        ("temperature", "hot"),
        ("max_tokens", 1.5),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"a": 1.0}),
        ("n", -1),
        ("queue_timeout_s", float("inf")),
        ("queue_timeout_s", "soon"),
    ],
)
def test_a_value_that_no_message_holds_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        generate_request("hello", cast(GenerateOptions, {name: value}))

    assert caught.value.field == name


def test_an_unknown_option_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(TypeError, match="max_token"):
        generate_request("hello", cast(GenerateOptions, {"max_token": 3}))


def test_token_ids_need_no_tokenizer() -> None:
    with pytest.raises(InvalidParameter, match="token ids already"):
        set_prompt(pb.TokenizeRequest(), [1, 2])
