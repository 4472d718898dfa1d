"""Each bad input: its status code, exactly one ErrorInfo with its reason, the field's name, and the limit in the message."""

import asyncio
import math
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from octavo.scheduler.v1 import inference_service_pb2 as pb
from octavo.types.v1.types_pb2 import SamplingParams
from tests.contract.errors import Seen, seen
from tests.integration.scheduler_svc.conftest import Serve, Served, tokens_request, until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
Call = Any


def text(prompt: str = "hello", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=prompt, **fields)


def sampling(**fields: Any) -> pb.GenerateRequest:
    return text(sampling=SamplingParams(**fields))


def stopping(**fields: Any) -> pb.GenerateRequest:
    return text(stopping=pb.StoppingCriteria(**fields))


def turn(role: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role=role, content="x")]))


def qos(**fields: Any) -> pb.GenerateRequest:
    return text(qos=pb.QosSpec(**fields))


# Request, field, what the message says about the limit.
BAD_REQUESTS: dict[str, tuple[pb.GenerateRequest, str, str]] = {
    "unknown class": (qos(service_class=9), "qos.service_class", "SERVICE_CLASS_INTERACTIVE, SERVICE_CLASS_STANDARD"),
    "priority 1001": (qos(priority=1001), "qos.priority", "at least -1000 and at most 1000"),
    "ttft target 0": (qos(ttft_target=Duration()), "qos.ttft_target", "above 0 s"),
    "tpot target 0": (qos(tpot_target=Duration()), "qos.tpot_target", "above 0 s"),
    "deadline -1": (qos(deadline=Duration(seconds=-1)), "qos.deadline", "above 0 s"),
    "no prompt": (pb.GenerateRequest(), "prompt", "exactly one of text, token_ids and chat"),
    "empty text": (text(""), "text", "at least one token"),
    "empty ids": (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids.ids", "at least one token"),
    "id out of vocabulary": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 300])), "token_ids.ids[1]", "vocabulary size 300"),
    "empty chat": (pb.GenerateRequest(chat=pb.Chat()), "chat.messages", "at least one"),
    "unknown role": (turn("tool"), "chat.messages[0].role", "system, user, assistant"),
    "temperature -1": (sampling(temperature=-1), "sampling.temperature", "at least 0 and at most 2"),
    "temperature nan": (sampling(temperature=math.nan), "sampling.temperature", "at most 2"),
    "temperature inf": (sampling(temperature=math.inf), "sampling.temperature", "at most 2"),
    "top_p 0": (sampling(top_p=0), "sampling.top_p", "above 0 and at most 1"),
    "top_p nan": (sampling(top_p=math.nan), "sampling.top_p", "at most 1"),
    "min_p 2": (sampling(min_p=2), "sampling.min_p", "at most 1"),
    "presence 3": (sampling(presence_penalty=3), "sampling.presence_penalty", "at most 2"),
    "frequency -3": (sampling(frequency_penalty=-3), "sampling.frequency_penalty", "at least -2"),
    "repetition 0": (sampling(repetition_penalty=0), "sampling.repetition_penalty", "above 0"),
    "bias 101": (sampling(logit_bias={1: 101}), "sampling.logit_bias[1]", "at most 100"),
    "bias nan": (sampling(logit_bias={1: math.nan}), "sampling.logit_bias[1]", "at most 100"),
    "bias out of vocabulary": (sampling(logit_bias={300: 1}), "sampling.logit_bias", "vocabulary size 300"),
    "2,000 biases": (sampling(logit_bias=dict.fromkeys(range(2000), 1)), "sampling.logit_bias", "at most 1024"),
    "10,000 stops": (stopping(stop=["x"] * 10_000), "stopping.stop", "at most 16"),
    "long stop": (stopping(stop=["é" * 129]), "stopping.stop[0]", "at most 256"),
    "empty stop": (stopping(stop=["a", ""]), "stopping.stop[1]", "at least 1"),
    "65 stop ids": (stopping(stop_token_ids=[1] * 65), "stopping.stop_token_ids", "at most 64"),
    "stop id out of vocabulary": (stopping(stop_token_ids=[300]), "stopping.stop_token_ids[0]", "vocabulary size 300"),
    "max_tokens 0": (stopping(max_tokens=0), "stopping.max_tokens", "at least 1"),
    "min above max": (stopping(max_tokens=3, min_tokens=4), "stopping.min_tokens", "max_tokens 3"),
    "n 0": (text(n=0), "n", "at least 1"),
    "n 65": (text(n=65), "n", "at most 64"),
    "logprobs 21": (text(output=pb.OutputOptions(logprobs=21)), "output.logprobs", "at most 20"),
    "long request_id": (text(request_id="x" * 129), "request_id", "at most 128"),
    "long cache_salt": (text(cache_salt="x" * 257), "cache_salt", "256 bytes"),
    "prompt over the context": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 128)), "token_ids.ids", "128 tokens"),
    "prompt and max_tokens over the context": (stopping(max_tokens=128), "text", "context of 128 tokens"),
    "absurd text": (text("x" * 4_000_000), "text", "context of 128 tokens"),
}


async def failure(call: Call) -> Seen:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return seen(caught.value)


async def stream_failure(served: Served, request: pb.GenerateRequest) -> Seen:
    async def read() -> None:
        async for _ in served.inference.StreamGenerate(pb.StreamGenerateRequest(generation=request)):
            pass

    return await failure(read())


async def test_bad_requests_name_field_and_limit_and_harm_nobody(serve: Serve) -> None:
    async with serve() as served:
        for name, (request, field, limit) in BAD_REQUESTS.items():
            for found in (await failure(served.inference.Generate(request)), await stream_failure(served, request)):
                reason = "PROMPT_TOO_LONG" if "over the context" in name or name == "absurd text" else "INVALID_PARAMETER"
                assert (name, found.code, found.reason) == (name, INVALID, reason)
                assert found.violations == [field] and found.infos[0].metadata["field"] == field
                assert found.message.startswith(f"{field}: ") and limit in found.message, found.message
        assert served.app.engine.num_open_requests == 0
        assert (await served.inference.Generate(tokens_request([1, 2], 3))).usage.completion_tokens == 3


async def test_a_long_prompt_says_its_size_and_the_context(serve: Serve) -> None:
    async with serve() as served:
        found = await failure(served.inference.Generate(BAD_REQUESTS["prompt over the context"][0]))
        assert (found.infos[0].metadata["promptTokens"], found.infos[0].metadata["maxContextTokens"]) == ("128", "128")


async def test_unknown_model(serve: Serve) -> None:
    async with serve() as served:
        found = await failure(served.inference.Generate(text(model="models/other")))
        assert (found.code, found.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        assert found.infos[0].metadata["model"] == "models/other"


async def test_more_than_the_device_pool_can_ever_hold(serve: Serve) -> None:
    async with serve(info={"num_blocks": 4}) as served:
        found = await failure(served.inference.Generate(tokens_request([1, 2, 3], 60)))
        assert (found.code, found.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "KV_POOL_TOO_SMALL")


async def test_a_full_queue_says_when_to_come_back(serve: Serve) -> None:
    async with serve(max_waiting_requests=1, info={"max_num_seqs": 1}) as served:
        served.fake.gate.clear()
        calls = [served.inference.Generate(tokens_request([1, 2], 3))]
        await until(lambda: served.app.engine.drivers[0].stats().num_running_requests == 1)
        calls.append(served.inference.Generate(tokens_request([1, 2], 3)))
        await until(lambda: served.app.engine.drivers[0].stats().num_waiting_requests == 1)
        found = await failure(served.inference.Generate(tokens_request([1, 2], 3)))
        assert (found.code, found.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert found.has_retry_delay
        served.fake.gate.set()
        assert [answer.usage.completion_tokens for answer in await asyncio.gather(*calls)] == [3, 3]


async def test_a_request_id_in_use(serve: Serve) -> None:
    async with serve() as served:
        served.fake.gate.clear()
        first = served.inference.Generate(tokens_request([1, 2], 3, request_id="same"))
        await until(lambda: served.app.engine.num_open_requests == 1)
        found = await failure(served.inference.Generate(tokens_request([1, 2], 3, request_id="same")))
        assert (found.code, found.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
        served.fake.gate.set()
        assert (await first).request_id == "same"
        assert (await served.inference.Generate(tokens_request([1, 2], 3, request_id="same"))).request_id == "same"


async def test_cancelled_by_another_call(serve: Serve) -> None:
    async with serve() as served:
        served.fake.gate.clear()
        running = asyncio.ensure_future(stream_failure(served, tokens_request([1, 2], 3, request_id="victim")))
        await until(lambda: served.app.engine.num_open_requests == 1)
        response = await served.inference.CancelGeneration(pb.CancelGenerationRequest(request_id="victim"))
        assert response.cancelled
        found = await running
        assert (found.code, found.reason) == (grpc.StatusCode.CANCELLED, "CANCELLED_BY_REQUEST")
        assert not (await served.inference.CancelGeneration(pb.CancelGenerationRequest(request_id="victim"))).cancelled


async def test_no_executor(serve: Serve) -> None:
    async with serve(executors=[], executor_wait_s=0.01) as served:
        found = await failure(served.inference.Generate(text()))
        assert (found.code, found.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR")
        assert found.has_retry_delay


async def test_draining(serve: Serve) -> None:
    async with serve() as served:
        await served.app.drain()
        found = await failure(served.inference.Generate(text()))
        assert (found.code, found.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_queue_timeout(serve: Serve) -> None:
    async with serve(info={"max_num_seqs": 1}) as served:
        served.fake.gate.clear()
        first = served.inference.Generate(tokens_request([1, 2], 3))
        await until(lambda: served.app.engine.drivers[0].stats().num_running_requests == 1)
        request = tokens_request([1, 2], 3)
        request.queue_timeout.FromMilliseconds(1)
        found = await failure(served.inference.Generate(request))
        assert (found.code, found.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "QUEUE_TIMEOUT")
        served.fake.gate.set()
        await first


async def test_a_deadline_in_the_past_and_one_that_passes(serve: Serve) -> None:
    async with serve() as served:
        served.fake.gate.clear()
        for timeout in (-1.0, 0.05):
            found = await failure(served.inference.Generate(tokens_request([1, 2], 3), timeout=timeout))
            assert found.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: served.app.engine.num_open_requests == 0)


@pytest.mark.parametrize(
    ("request_bytes", "field"),
    [
        (text("XX").SerializeToString(), "text"),
        (stopping(stop=["a", "XX"]).SerializeToString(), "stopping.stop[1]"),
        (text(request_id="XX").SerializeToString(), "request_id"),
    ],
)
async def test_text_that_is_not_utf8(serve: Serve, request_bytes: bytes, field: str) -> None:
    async with serve() as served:
        call = served.channel.unary_unary("/octavo.scheduler.v1.InferenceService/Generate")
        found = await failure(call(request_bytes.replace(b"XX", b"\xff\xfe")))
        assert (found.code, found.reason, found.violations) == (INVALID, "INVALID_PARAMETER", [field])


async def test_a_message_of_20_mib_is_refused_by_the_library(serve: Serve) -> None:
    async with serve() as served:
        request = text("x" * (20 << 20))
        found = await failure(served.inference.Generate(request))
        # gRPC itself refuses it while it reads, before any code of ours: no ErrorInfo, which is how clients tell it apart.
        assert (found.code, found.infos) == (grpc.StatusCode.RESOURCE_EXHAUSTED, [])
        assert str(16 << 20) in found.message


@pytest.mark.parametrize(
    ("service", "token", "code"),
    [
        ("inference", None, grpc.StatusCode.UNAUTHENTICATED),
        ("inference", "wrong", grpc.StatusCode.UNAUTHENTICATED),
        ("inference", "user", None),
        ("inference", "admin", None),
        ("admin", "user", grpc.StatusCode.PERMISSION_DENIED),
        ("admin", "admin", None),
    ],
)
async def test_tokens(serve: Serve, service: str, token: str | None, code: grpc.StatusCode | None) -> None:
    from octavo.scheduler.v1 import admin_service_pb2 as admin_pb

    async with serve(token="user", admin_token="admin") as served:
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        if service == "admin":
            call: Call = served.admin.GetLoad(admin_pb.GetLoadRequest(), metadata=metadata)
        else:
            call = served.inference.Generate(tokens_request([1, 2], 3), metadata=metadata)
        if code is None:
            await call
        else:
            found = await failure(call)
            assert (found.code, found.reason) == (code, code.name)


async def test_tokenize_and_detokenize_check_alike(serve: Serve) -> None:
    async with serve() as served:
        for call, field in (
            (served.inference.Tokenize(pb.TokenizeRequest()), "input"),
            (served.inference.Tokenize(pb.TokenizeRequest(text="")), "text"),
            (served.inference.Detokenize(pb.DetokenizeRequest(token_ids=[300])), "token_ids[0]"),
            (served.inference.CancelGeneration(pb.CancelGenerationRequest()), "request_id"),
        ):
            found = await failure(call)
            assert (found.code, found.reason, found.violations) == (INVALID, "INVALID_PARAMETER", [field])


async def test_without_a_tokenizer_only_token_ids_are_taken(serve: Serve) -> None:
    async with serve(with_model=False) as served:
        for request, field in ((text(), "text"), (turn("user"), "chat"), (stopping(stop=["a"]), "stopping.stop")):
            found = await failure(served.inference.Generate(request))
            assert (found.code, found.violations) == (INVALID, [field])
        assert (await served.inference.Generate(tokens_request([1, 2], 3))).usage.completion_tokens == 3
